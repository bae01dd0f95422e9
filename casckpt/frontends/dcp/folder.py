"""A folder that torch.distributed.checkpoint wrote, read without running what is in its pickles."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from casckpt.errors import CasckptError, Damaged, InvalidInput, Refused, Unsupported
from casckpt.frontends.dcp.items import BoxedStream
from casckpt.frontends.dcp.unflattened import places, unflatten
from casckpt.storage.files import Files
from casckpt.tensors.objects import is_only_torchs

METADATA: Final = ".metadata"
MEGATRON: Final = "metadata.json"
_UNREADABLE = (pickle.UnpicklingError, AttributeError, ImportError, EOFError, LookupError, TypeError, ValueError,
               RuntimeError, OSError)  # fmt: skip
_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
_PLAN_CLASSES = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")  # Megatron keeps them
_MEGATRON_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED: Final[dict[tuple[str, str], Any]] = {
    **{(dcp.__name__, name): getattr(dcp, name) for name in _CLASSES if hasattr(dcp, name)},
    **{(planner.__name__, name): getattr(planner, name) for name in _PLAN_CLASSES if hasattr(planner, name)},
    (_MEGATRON_MODULE, "MCoreMetadata"): type("MCoreMetadata", (Metadata,), {}),  # of versions up to 0.15
    (_MEGATRON_MODULE, "MCoreSavePlan"): type("MCoreSavePlan", (SavePlan,), {}),
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "PurePosixPath"): lambda *parts: "/".join(parts),
    ("builtins", "set"): set,
}


def is_megatron(config: bytes) -> bool:
    """Is this the ``metadata.json`` of a folder that Megatron's strategy "torch_dist" wrote?"""
    try:
        found = json.loads(config)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("sharded_backend") == "torch_dist"


class _Unpickler(pickle.Unpickler):
    """Knows DCP's metadata and plans, of Megatron's versions too, and, unless it may be ``anything``, nothing else."""

    def __init__(self, data: io.BytesIO, *, anything: bool) -> None:
        super().__init__(data)
        self._anything = anything

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None and self._anything:
            return super().find_class(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return found


class Folder:
    """``files``: those of the folder. Raises Refused or InvalidInput for metadata of no use."""

    def __init__(self, files: Files, *, allow_pickle: bool) -> None:
        self._files, self._allow_pickle = files, allow_pickle
        self._boxed = is_megatron(files.read(MEGATRON)) if MEGATRON in files.names() else False
        self.metadata, self._cuts = unflatten(self._read_metadata())
        self._places: dict[MetadataIndex, _StorageInfo] = places(self.metadata.storage_data or {}, self._cuts)

    def _read_metadata(self) -> Metadata:
        data = self._files.read(METADATA)
        try:
            found = _Unpickler(io.BytesIO(data), anything=self._allow_pickle).load()
        except _UNREADABLE as error:
            if isinstance(error, pickle.UnpicklingError) and not self._allow_pickle:
                raise InvalidInput(
                    f"{self._files.url}/{METADATA} is more than DCP's own metadata ({error}), and reading it runs code "
                    "from it; pass allow_pickle=True (--allow-pickle) if you trust whoever wrote it"
                ) from error
            raise Refused(f"{self._files.url}/{METADATA} cannot be read: {error!r}") from error
        if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
            raise Refused(f"{self._files.url}/{METADATA} is no metadata of torch.distributed.checkpoint")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (item.tensor_data for item in self.plan().items)
        return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in parts if data is not None)

    def plan(self) -> SavePlan:
        """All that is in the folder, as a plan to save it."""
        items: list[WriteItem] = []
        for key, value in self.metadata.state_dict_metadata.items():
            if isinstance(value, BytesStorageMetadata):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            for chunk in value.chunks:
                data = TensorWriteData(chunk, value.properties, value.size)
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(self._in_file_order(items))

    def _in_file_order(self, items: list[WriteItem]) -> list[WriteItem]:
        def order(item: WriteItem) -> tuple[str, int]:
            place = self._places.get(item.index)
            return ("", 0) if place is None else (place.relative_path, place.offset)

        return sorted(items, key=order)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item; of a `SavePlanner`, what is asked for. Raises Damaged, naming key and file."""
        key, place = item.index.fqn, self._places.get(item.index)
        if place is None:
            raise Damaged(f"{self._files.url}/{METADATA} does not say where {key!r} lies", key=key)
        if getattr(place, "transform_descriptors", None):
            raise Unsupported(
                f"{key!r} is stored with {place.transform_descriptors}, which cannot be read here", key=key
            )
        try:
            with self._files.part(place.relative_path, place.offset, place.length) as view:
                if item.type == WriteItemType.BYTE_IO:
                    data = view.read()
                    return self._unboxed(data) if self._boxed else io.BytesIO(data)
                found = torch.load(view, map_location="cpu", weights_only=True)
        except CasckptError:  # some are OSErrors too
            raise
        except _UNREADABLE as error:
            where = f"{self._files.url}/{place.relative_path}"
            raise Damaged(f"{key!r} cannot be read from {where} at {place.offset}: {error}", key=key) from error
        if not isinstance(found, torch.Tensor):
            raise Refused(f"{key!r} is no tensor in {place.relative_path}, but in the metadata it is", key=key)
        cut = self._cuts.get(item.index)
        return found if cut is None else cut.out_of(found)

    def _unboxed(self, data: bytes) -> io.BytesIO:
        """With the one value of a list, as Megatron keeps objects; without where only a pickle could tell it."""
        if not is_only_torchs(data):
            return io.BytesIO(data)
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not self._allow_pickle)
        except _UNREADABLE:
            return io.BytesIO(data)
        return BoxedStream(data, found[0]) if isinstance(found, list) and len(found) == 1 else io.BytesIO(data)
