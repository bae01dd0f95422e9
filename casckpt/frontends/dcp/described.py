"""Reads and validates the ``.metadata`` file of a DCP folder without running code from it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, Final, TypeGuard

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

from casckpt.errors import InvalidInput, Refused
from casckpt.format.regions import Box, check_shape, full_box
from casckpt.tensors.untrusted import BoundedUnpickler, check_expansion, misread

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
    wrong = _wrong(metadata)
    if wrong:
        raise Refused(f"{where} is not valid torch.distributed.checkpoint metadata: {wrong}")
    check_expansion(metadata.planner_data, len(data), where)
    return metadata  # type: ignore[no-any-return] # `_wrong` has checked it


def _wrong(metadata: Any) -> str:
    """Describe what is wrong with unpickled metadata.

    Return "" if it is valid. The attributes of ``metadata`` may have any type.
    """
    described = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(metadata, dcp.Metadata) or not isinstance(described, dict):
        return f"it is a {type(metadata).__name__}, or it does not describe any tensors"
    for key, value in described.items():
        if type(key) is not str:
            return f"a key is of type {type(key).__name__}"
        if not isinstance(value, dcp.BytesStorageMetadata) and not _is_tensor(value):
            return f"the description of {key!r:.200} is invalid"
    places = metadata.storage_data
    if places is not None and not isinstance(places, dict):
        return "it has no valid tensor locations"
    for index, place in (places or {}).items():
        if not isinstance(index, dcp.MetadataIndex) or not _is_place(place):
            return "the locations of some parts are missing or invalid"
    return ""


def _is_tensor(value: Any) -> bool:
    properties, size = getattr(value, "properties", None), getattr(value, "size", None)
    chunks = getattr(value, "chunks", None)
    if not isinstance(value, dcp.TensorStorageMetadata) or not isinstance(chunks, list | tuple):
        return False
    if not isinstance(getattr(properties, "dtype", None), torch.dtype) or not _is_shape(size):
        return False
    return all(_is_inside(chunk, tuple(size)) for chunk in chunks)


def _is_inside(chunk: Any, size: tuple[int, ...]) -> bool:
    offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
    if not isinstance(chunk, dcp.ChunkStorageMetadata) or not _is_shape(offsets) or not _is_shape(sizes):
        return False
    if not len(offsets) == len(sizes) == len(size):
        return False
    return 0 in sizes or Box(tuple(offsets), tuple(sizes)).inside(full_box(size))


def _is_shape(shape: Any) -> TypeGuard[tuple[int, ...]]:
    if not isinstance(shape, tuple) or not all(type(extent) is int for extent in shape):
        return False
    try:
        check_shape(tuple(shape))
    except InvalidInput:
        return False
    return True


def _is_place(place: Any) -> bool:
    path, offset, length = (getattr(place, name, None) for name in ("relative_path", "offset", "length"))
    return type(path) is str and type(offset) is int and type(length) is int and min(offset, length) >= 0
