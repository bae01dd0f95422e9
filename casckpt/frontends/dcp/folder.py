"""Reads a torch.distributed.checkpoint folder without running code from its pickles, and nests its flat keys."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from casckpt.base.text import listed
from casckpt.errors import Damaged, InvalidInput, Refused, Unsupported
from casckpt.format.regions import Box, Region, Shape, flat_boxes, full_box
from casckpt.frontends.dcp.items import BoxedStream
from casckpt.storage.files import Files
from casckpt.tensors.foreign import part_shape
from casckpt.tensors.objects import is_archive, is_only_torchs, read_archive
from casckpt.tensors.state import check_key
from casckpt.tensors.untrusted import MISREAD, BoundedUnpickler, misread

_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
_PLAN_CLASSES = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")  # stored by Megatron
_MEGATRON_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
_MAX_PATH = 4096


def _path(*parts: str) -> str:
    if sum(len(part) for part in parts[:_MAX_PATH]) + len(parts) > _MAX_PATH:
        raise ValueError(f"it has a path of more than {_MAX_PATH} characters")
    return "/".join(parts)


def _empty_dict() -> dict[Any, Any]:
    return {}


def _short_set(items: Iterable[Any] = ()) -> set[Any]:
    listed = list(items)
    if not all(isinstance(item, str | int | float | bytes | None) for item in listed):
        raise ValueError("it has a set whose items are not all strings or numbers")
    return set(listed)


_NAMES: Final[dict[tuple[str, str], Any]] = {
    **{(dcp.__name__, name): getattr(dcp, name) for name in _CLASSES if hasattr(dcp, name)},
    **{(planner.__name__, name): getattr(planner, name) for name in _PLAN_CLASSES if hasattr(planner, name)},
    **{("torch", str(one)[6:]): one for one in vars(torch).values() if isinstance(one, torch.dtype)},
    (_MEGATRON_MODULE, "MCoreMetadata"): type("MCoreMetadata", (dcp.Metadata,), {}),  # in versions up to 0.15
    (_MEGATRON_MODULE, "MCoreSavePlan"): type("MCoreSavePlan", (SavePlan,), {}),
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): _empty_dict,  # filled later by the pickle
    # Python 3.13 has the classes in another module
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
    ("builtins", "set"): _short_set,
}


def read_metadata(data: bytes, where: str, *, anything: bool) -> dcp.Metadata:
    """Read the metadata from the file ``where``. ``anything``: allow any pickle, even one that runs code.

    Raises InvalidInput for a file that needs ``anything``, and Refused for invalid metadata.
    """
    with misread(lambda why: Refused(f"{where} cannot be read: {why}; get a complete copy of the file")):
        try:
            metadata = BoundedUnpickler(data, _NAMES, anything=anything).load()
        except pickle.UnpicklingError as error:
            if anything:
                raise
            raise InvalidInput(
                f"{where} holds more than DCP's own metadata ({error}), so reading it runs code from the file; pass "
                "allow_pickle=True (--allow-pickle) if you trust its source"
            ) from error
    with misread(lambda why: Refused(f"{where} is not valid torch.distributed.checkpoint metadata: {why}")):
        _check(metadata)
    return metadata  # type: ignore[no-any-return] # `_check` has checked it


def _check(metadata: Any) -> None:
    """Raise one of `MISREAD` for invalid metadata, whose attributes may have any type."""
    if not isinstance(metadata, dcp.Metadata):
        raise TypeError(f"it is a {type(metadata).__name__}")
    for key, value in dict(metadata.state_dict_metadata).items():
        check_key(key)
        if not isinstance(value, dcp.BytesStorageMetadata):
            _check_tensor(key, value)
    for index, place in dict(metadata.storage_data or {}).items():
        if not isinstance(index, dcp.MetadataIndex) or not _is_place(place):
            raise ValueError("the locations of some parts are missing or invalid")


def _check_tensor(key: str, value: Any) -> None:
    is_valid = isinstance(value, dcp.TensorStorageMetadata) and isinstance(value.properties.dtype, torch.dtype)
    full, numbers = full_box(value.size), [*value.size]
    for chunk in value.chunks:
        box = Box(chunk.offsets, chunk.sizes)
        is_inside = len(box.shape) == len(full.shape) and (0 in box.shape or box.inside(full))
        is_valid = is_valid and isinstance(chunk, dcp.ChunkStorageMetadata) and is_inside
        numbers += [*box.offset, *box.shape]
    if not is_valid or not all(type(number) is int for number in numbers):  # 1.0 and True equal 1
        raise ValueError(f"the description of {key!r:.200} is invalid")


def _is_place(place: Any) -> bool:
    path, offset, length = (getattr(place, name, None) for name in ("relative_path", "offset", "length"))
    return type(path) is str and type(offset) is int and type(length) is int and min(offset, length) >= 0


_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class FlatBox:
    """A box of a tensor, and its start in the flat chunk that the folder stores under ``index``."""

    index: MetadataIndex
    start: int
    offset: Shape
    shape: Shape

    def out_of(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the box's elements from a chunk, as a copy unless they are the whole chunk.

        A short chunk yields fewer elements.
        """
        box = torch.Size(self.shape)
        part = chunk.flatten()[self.start : self.start + box.numel()]
        if part.numel() != box.numel():
            return part
        return (part if part.numel() == chunk.numel() else part.clone()).view(box)


def unflatten(metadata: Metadata) -> tuple[Metadata, dict[MetadataIndex, FlatBox]]:
    """Describe flat tensors as boxes of their original shape.

    Return the metadata, and the part of a chunk for each box.
    """
    described, cuts = dict(metadata.state_dict_metadata), dict[MetadataIndex, FlatBox]()
    for key, shape in _own_shapes(metadata):
        stored = described.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            continue
        boxes = _cuts(key, stored, shape)
        if boxes:
            chunks = [ChunkStorageMetadata(torch.Size(cut.offset), torch.Size(cut.shape)) for cut in boxes.values()]
            described[key] = TensorStorageMetadata(stored.properties, torch.Size(shape), chunks)
            cuts |= boxes
    return (replace(metadata, state_dict_metadata=described) if cuts else metadata), cuts


def _own_shapes(metadata: Metadata) -> Iterator[tuple[str, Shape]]:
    """Yield the shapes that Megatron recorded."""
    noted = getattr(metadata, "mcore_data", None)
    for key, value in noted.items() if isinstance(noted, dict) else ():
        shape = value.get(_SHAPE) if isinstance(value, dict) else None
        if isinstance(shape, tuple) and all(type(extent) is int for extent in shape):
            yield key, shape


def _cuts(key: str, stored: TensorStorageMetadata, shape: Shape) -> dict[MetadataIndex, FlatBox]:
    """Split a tensor's flat chunks into boxes. Return an empty dict for a tensor that is not flat."""
    part = part_shape(shape, tuple(stored.size))
    if part is None or any(not set(chunk.sizes[:-1]) <= {1} for chunk in stored.chunks):
        return {}
    cuts = {}
    for chunk in stored.chunks:
        *at, lo = chunk.offsets
        box = Box(tuple(i * extent for i, extent in zip(at, part, strict=True)), part)
        for piece, start in flat_boxes(Region(box, lo, lo + chunk.sizes[-1])):
            cut = FlatBox(MetadataIndex(key, chunk.offsets), start - lo, piece.offset, piece.shape)
            cuts[MetadataIndex(key, torch.Size(piece.offset))] = cut
    return cuts


def places(stored: Mapping[MetadataIndex, Any], cuts: Mapping[MetadataIndex, FlatBox]) -> dict[MetadataIndex, Any]:
    """Return the location of each box, which is the location of its chunk."""
    return {**stored, **{index: stored[cut.index] for index, cut in cuts.items() if cut.index in stored}}


METADATA: Final = ".metadata"
MEGATRON: Final = "metadata.json"


def is_megatron(config: bytes) -> bool:
    """Return whether this is the ``metadata.json`` of a folder that Megatron's "torch_dist" strategy wrote."""
    try:
        content = json.loads(config)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"


class Folder:
    """A DCP folder. ``files``: the files in it. Raises Refused or InvalidInput for invalid metadata."""

    def __init__(self, files: Files, *, allow_pickle: bool) -> None:
        self._files, self._allow_pickle = files, allow_pickle
        names = files.names()
        deeper = [name.removesuffix(f"/{METADATA}") for name in names if name.endswith(f"/{METADATA}")]
        if METADATA not in names and deeper:
            raise InvalidInput(
                f"{files.url} is not a checkpoint itself, but contains several: {listed(deeper)}; choose one of them"
            )
        self._boxed = is_megatron(files.read(MEGATRON)) if MEGATRON in names else False
        stored = read_metadata(files.read(METADATA), f"{files.url}/{METADATA}", anything=allow_pickle)
        self.metadata, self._cuts = unflatten(stored)
        self._places: dict[MetadataIndex, _StorageInfo] = places(self.metadata.storage_data or {}, self._cuts)
        self._values: dict[str, io.BytesIO] = {}

    def plan(self) -> SavePlan:
        """Return a plan that saves the whole folder."""
        items = []
        for key, value in self.metadata.state_dict_metadata.items():
            if isinstance(value, BytesStorageMetadata):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            for chunk in value.chunks:
                data = TensorWriteData(chunk, value.properties, value.size)
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))

        def order(item: WriteItem) -> tuple[str, int]:
            place = self._places.get(item.index)
            return ("", 0) if place is None else (place.relative_path, place.offset)

        return SavePlan(sorted(items, key=order))

    def read_values(self, plan: SavePlan) -> None:
        """Read and check the non-tensor values of a plan. `resolve_data` later returns them.

        Raises InvalidInput, naming the keys, for values that torch's restricted unpickler cannot read. With
        ``allow_pickle``, such values are kept as bytes instead.
        """
        items = (item for item in plan.items if item.type == WriteItemType.BYTE_IO)
        values = {item.index.fqn: self._read_value(item) for item in items}
        checked = {} if self._allow_pickle else values
        unread = sorted(key for key, stream in checked.items() if not _is_readable(stream.getvalue()))
        if unread:
            raise InvalidInput(
                f"{self._files.url}: {', '.join(map(repr, unread[:6]))}{', ...' if len(unread) > 6 else ''} "
                f"({len(unread)} of {len(values)} values) are damaged, or are pickles that hold more than tensors "
                "and plain data, so reading them runs code; pass allow_pickle=True (--allow-pickle) to keep them "
                "unchanged if you trust their source",
                keys=tuple(unread),
            )
        self._values = values

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item's data, as a `SavePlanner` does. Raises Damaged, naming the key and the file."""
        if item.type == WriteItemType.BYTE_IO:
            key = item.index.fqn
            return self._values.pop(key) if key in self._values else self._read_value(item)
        with self._part(item) as view:
            data = torch.load(view, map_location="cpu", weights_only=True)
            if not isinstance(data, torch.Tensor):
                raise Refused(
                    f"{item.index.fqn!r} is a tensor according to the metadata, but not in the data", key=item.index.fqn
                )
            if data.untyped_storage().nbytes() < data.numel() * data.element_size():
                raise ValueError("its tensor is larger than its data")
        cut = self._cuts.get(item.index)
        return data if cut is None else cut.out_of(data)

    def _read_value(self, item: WriteItem) -> io.BytesIO:
        with self._part(item) as view:
            data = view.read()
        return self._unboxed(data) if self._boxed else io.BytesIO(data)

    @contextmanager
    def _part(self, item: WriteItem) -> Iterator[BinaryIO]:
        """Open the part of a file that holds an item. Errors inside the context are raised as Damaged."""
        key, place = item.index.fqn, self._places.get(item.index)
        if place is None:
            raise Damaged(f"{self._files.url}/{METADATA} does not list a location for {key!r}", key=key)
        if getattr(place, "transform_descriptors", None):
            raise Unsupported(
                f"{key!r} is stored with {place.transform_descriptors}, which casckpt cannot read", key=key
            )
        where = f"{self._files.url}/{place.relative_path} at {place.offset}"
        with (
            misread(lambda why: Damaged(f"{key!r} cannot be read from {where}: {why}", key=key)),
            self._files.part(place.relative_path, place.offset, place.length) as view,
        ):
            yield view

    def _unboxed(self, data: bytes) -> io.BytesIO:
        """Unwrap a value from the one-item list that Megatron writes for each object. Pickles are kept as bytes."""
        if not is_only_torchs(data):
            return io.BytesIO(data)
        try:
            box = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not self._allow_pickle)
        except MISREAD:
            return io.BytesIO(data)
        return BoxedStream(data, box[0]) if isinstance(box, list) and len(box) == 1 else io.BytesIO(data)


def _is_readable(data: bytes) -> bool:
    """Return whether torch's restricted unpickler can read a value."""
    try:
        read_archive(data)
    except MISREAD:
        return False
    return is_archive(data)
