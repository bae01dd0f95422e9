"""Planners that pass values as plain data. DCP's own planners pass pickles."""

from __future__ import annotations

import io
from typing import Any, Final, TypeGuard, TypeVar

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from typing_extensions import override

from casckpt.errors import InvalidInput
from casckpt.format import plain
from casckpt.tensors.objects import TORCH_EXTENSIONS

P = TypeVar("P")
MAGIC: Final = b"casckpt plain data\n"


def has_methods_of(planner: object, default: type[P], *names: str) -> TypeGuard[P]:
    """Return whether a planner inherits these methods from DCP's class ``default`` without overriding them."""
    same = (getattr(type(planner), name, None) is getattr(default, name) for name in names)
    return isinstance(planner, default) and all(same)


class ValueStream(io.BytesIO):
    """A value that a planner passes to the storage, or receives from it.

    Its bytes are plain data, or empty if the value is not plain data.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            data = MAGIC + plain.encode(value, extensions=TORCH_EXTENSIONS)
        except InvalidInput:
            data = b""
        super().__init__(data)


def value_of(stream: io.BytesIO) -> Any:
    """Return the value of a `ValueStream`, or of a copy of its bytes. Raises InvalidInput for any other bytes."""
    if isinstance(stream, ValueStream):
        return stream.value
    data = stream.getvalue()
    if not data.startswith(MAGIC):
        raise InvalidInput(
            "PickleFreeLoadPlanner received bytes in an unexpected format; load with casckpt's StorageReader"
        )
    return plain.decode(data[len(MAGIC) :], extensions=TORCH_EXTENSIONS, strict=True)


class PickleFreeSavePlanner(DefaultSavePlanner):
    """DCP's default planner, except that it passes non-tensor values as plain data and never as a pickle.

    It requires `StorageWriter`, which rejects values that are not plain data and names their keys, unless
    ``allow_pickle`` is set.
    """

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return ValueStream(object)
        tensor: torch.Tensor | io.BytesIO = super().transform_object(write_item, object)
        return tensor


class PickleFreeLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, except that it accepts non-tensor values from `StorageReader` without unpickling."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], value_of(value))
        else:
            self.state_dict[key] = value_of(value)
