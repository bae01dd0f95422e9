"""Converts the items of a DCP plan to the entries of a save: parts of tensors, and objects."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from casckpt.base.groups import in_batches
from casckpt.errors import InvalidInput
from casckpt.format import plain
from casckpt.format.manifest import ObjectEntry
from casckpt.format.regions import Box, Region, Shape, full_box, whole
from casckpt.format.sections.index import TENSOR
from casckpt.format.tree import find
from casckpt.frontends.dcp.planners import ValueStream, has_methods_of
from casckpt.frontends.dcp.schema import Chunk, is_one_value
from casckpt.saving.local_entries import LocalEntry
from casckpt.saving.prepare import Prepared, prepare, stored_object
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.objects import is_archive, is_only_torchs, read_archive
from casckpt.tensors.shards import Piece, check_storable, data_and_shards, local_tensor
from casckpt.tensors.state import decode_tree, encode_tree
from casckpt.tensors.untrusted import MISREAD

WINDOW_BYTES: Final = 256 << 20
"""The maximum number of tensor bytes that a planner creates at a time."""
_HANDING_OVER: Final = ("resolve_data", "transform_object")
_INLINE: Final = 256 << 10  # a load checks planner bytes up to this size before it changes anything


class Resolver(Protocol):
    """The source of an item's data: a planner, or a folder that is being imported."""

    def resolve_data(self, write_item: WriteItem, /) -> Any:
        """Return the item's data: a tensor or bytes."""


class BoxedStream(io.BytesIO):
    """The bytes that torch.save wrote for a list with ``value`` as its only item."""

    def __init__(self, data: bytes, value: Any) -> None:
        super().__init__(data)
        self.value = value


@dataclass
class Values:
    """A rank's non-tensor values. ``nodes``: the encoded tree of each container.

    ``opaque``: the keys of values that are stored as the planner's bytes. ``is_odd``: whether DCP's planner would
    flatten a value.
    """

    objects: list[ObjectEntry] = field(default_factory=list)
    sources: list[LocalEntry] = field(default_factory=list)
    nodes: dict[str, bytes] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    is_odd: bool = False


def values_of(items: Iterable[WriteItem], planner: Resolver, *, allow_pickle: bool) -> Values:
    """Return the planner's non-tensor values. Raises InvalidInput, naming the key."""
    values = Values()
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            _add_value(values, item, planner, allow_pickle)
    return values


def _add_value(values: Values, item: WriteItem, planner: Resolver, allow_pickle: bool) -> None:
    key = item.index.fqn
    if has_methods_of(planner, DefaultSavePlanner, *_HANDING_OVER):  # the default would only pickle the value
        value = planner.lookup_object(item.index)
        if _add_plain(values, key, value):
            return
    stream = planner.resolve_data(item)
    if isinstance(stream, BoxedStream) and _add_plain(values, key, stream.value, allow_pickle):
        return
    if isinstance(stream, ValueStream):
        _add_prepared(values, key, prepare({key: stream.value}, None, rank=0, allow_pickle=allow_pickle), stream.value)
        return
    if not isinstance(stream, io.BytesIO):
        raise InvalidInput(f"{key!r}: the planner returned {type(stream).__name__} for a bytes item", key=key)
    data = stream.getvalue()
    # a planner may depend on the exact bytes, but only torch reads the values of a folder
    if isinstance(planner, SavePlanner) or not (is_archive(data) and _add_archive(values, key, data)):
        _add_opaque(values, key, data)


def _add_archive(values: Values, key: str, data: bytes) -> bool:
    """Add a value of a folder that torch.save wrote. Return False if it cannot be read, or holds more than that."""
    try:
        value, is_torchs = read_archive(data), is_only_torchs(data)
    except MISREAD:  # InvalidInput is a ValueError
        return False
    return is_torchs and _add_plain(values, key, value)


def _add_plain(values: Values, key: str, value: Any, allow_pickle: bool = False) -> bool:
    """Add a value as the native API stores it. Return False if the value would not load unchanged."""
    if not _comes_back(value):
        return False
    try:
        prepared = prepare({key: value}, None, rank=0, allow_pickle=allow_pickle)
    except InvalidInput:
        return False
    _add_prepared(values, key, prepared, value)
    return True


def _add_prepared(values: Values, key: str, prepared: Prepared, value: Any) -> None:
    values.objects += prepared.objects
    values.sources += prepared.sources
    node = find(decode_tree(prepared.tree), key)
    if node is not None and not isinstance(node, int):
        values.nodes[key] = encode_tree(node)
    values.is_odd |= not is_one_value(value) and not isinstance(value, tuple)


def _comes_back(value: Any) -> bool:
    """Return whether a value loads unchanged.

    This is the case if it contains only plain tensors, and containers of types that casckpt preserves.
    """
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:  # the value may contain itself
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            is_strided = type(item) is torch.Tensor and item.layout is torch.strided
            if not is_strided or item.requires_grad or item.device.type != "cpu":
                return False
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
    return True


def _add_opaque(values: Values, key: str, data: bytes) -> None:
    """Add bytes unchanged. A load without DCP requires bytes that torch's restricted unpickler can read."""

    def encode(spill: plain.Spill) -> tuple[bytes, bool]:
        return plain.encode(data, spill=spill, spill_from=_INLINE, where=key), is_archive(data)

    entry, parts = stored_object(key, None, encode)
    values.objects.append(entry)
    values.sources += parts
    values.opaque.add(key)


# tensors


@dataclass(frozen=True)
class _Part:
    """An item: a tensor's key and the region that is saved."""

    item: WriteItem
    key: str
    shape: Shape
    region: Region

    @property
    def nbytes(self) -> int:
        dtype = self.item.tensor_data.properties.dtype if self.item.tensor_data else torch.uint8
        return self.region.numel * dtype.itemsize


@dataclass
class Tensors:
    """The tensors in a rank's plan. ``chunks``: see `casckpt.frontends.dcp.schema.Note`."""

    parts: list[_Part] = field(default_factory=list)
    chunks: dict[str, tuple[Shape, list[Chunk]]] = field(default_factory=dict)

    def windows(self, planner: Resolver) -> Iterator[list[_Part]]:
        """Yield all parts together, or in windows if the planner may create the tensors."""
        if has_methods_of(planner, DefaultSavePlanner, *_HANDING_OVER, "lookup_object"):
            yield self.parts
            return
        yield from in_batches(self.parts, lambda part: part.nbytes, WINDOW_BYTES) if self.parts else iter([[]])


def tensors_of(items: Iterable[WriteItem], *, alone: bool) -> Tensors:
    """Return the tensors of a plan.

    ``alone``: whether this rank saves without the others, with each part under its own key.
    """
    tensors = Tensors()
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            continue
        key = item.index.fqn
        shape, sizes, box = _place_of(item)
        if alone and sizes != shape:
            chunks = tensors.chunks.setdefault(key, (shape, []))[1]
            if box is not None:
                part = Chunk(f"{key}@{'x'.join(map(str, box.offset))}", box.offset, box.shape)
                chunks.append(part)
                tensors.parts.append(_Part(item, part.key, box.shape, whole(box.shape)))
        else:
            region = Region(full_box(shape), 0, 0) if box is None else Region(box, 0, box.numel)
            tensors.parts.append(_Part(item, key, shape, region))
    return tensors


def _place_of(item: WriteItem) -> tuple[Shape, Shape, Box | None]:
    """Return the shape of an item's tensor, the shape of its part, and the part's box (None if it is empty)."""
    key, data = item.index.fqn, item.tensor_data
    if data is None:
        raise InvalidInput(f"{key!r}: the plan has a tensor item without a size", key=key)
    shape, sizes = tuple(data.size), tuple(data.chunk.sizes)
    if 0 in sizes:
        return shape, sizes, None
    box = Box(tuple(data.chunk.offsets), sizes)
    if len(sizes) != len(shape) or not box.inside(full_box(shape)):
        raise InvalidInput(f"{key!r}: a part at {list(box.offset)} lies outside the shape {list(sizes)}", key=key)
    return shape, sizes, box


def is_whole(value: Any) -> bool:
    """Return whether several ranks may hold the elements of a value.

    It must be a plain tensor or a replicated DTensor.
    """
    if is_dtensor(value):
        return any(placement.is_replicate() for placement in value.placements)
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def sources_of(parts: Sequence[_Part], planner: Resolver, is_frozen: Any) -> list[LocalEntry]:
    """Return the planner's data for these parts. Raises InvalidInput, naming the key, for invalid tensors."""
    pieces: dict[str, list[Piece]] = {}
    first: dict[str, tuple[str, Shape]] = {}
    for part in parts:
        data = _resolved(part, planner)
        form = dtype_name(data.dtype), part.shape
        if first.setdefault(part.key, form) != form:
            raise InvalidInput(
                f"{part.key!r}: parts of the same tensor differ in dtype or shape: {form[0]} and {first[part.key][0]}",
                key=part.key,
            )
        held = pieces.setdefault(part.key, [])
        if part.region.numel:
            held.append(Piece(part.region, data))
    return [
        LocalEntry(TENSOR, key, 0, None, dtype, shape, *data_and_shards(shape, pieces[key]), frozen=is_frozen(key))
        for key, (dtype, shape) in first.items()
    ]


def check_planned(key: str, tensor: torch.Tensor, box: Box) -> None:
    """Raise InvalidInput unless this rank holds the elements of ``box``, as torch's planner assumes.

    The planner assumes that mesh dimensions shard from left to right. Older versions treat partial sums as whole
    tensors.
    """
    regions = [piece.region for piece in local_tensor(key, tensor).pieces]
    if not any(box.inside(region.box) for region in regions):
        raise InvalidInput(
            f"{key!r}: torch's planner expects this rank to hold {Region(box, 0, box.numel)}, but it holds "
            f"{', '.join(map(str, regions)) or 'nothing'}; save and load it with casckpt.Store",
            key=key,
        )


def _resolved(part: _Part, planner: Resolver) -> torch.Tensor:
    key = part.item.index.fqn
    held = planner.state_dict.get(key) if isinstance(planner, DefaultSavePlanner) else None
    box = _place_of(part.item)[2]
    if is_dtensor(held) and box is not None:
        check_planned(key, held, box)
    data = planner.resolve_data(part.item)
    if not isinstance(data, torch.Tensor):
        raise InvalidInput(f"{key!r}: the planner returned {type(data).__name__} for a tensor", key=key)
    data = data.detach()
    if not part.region.numel and not data.numel():
        return data
    if tuple(data.shape) != part.region.box.shape:
        raise InvalidInput(
            f"{key!r}: the planner returned a tensor of shape {list(data.shape)} for a part of shape "
            f"{part.region.box.shape}",
            key=key,
        )
    check_storable(key, data)
    return data
