"""Planners that hand values over as they are, where DCP's own ones hand over pickles."""

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
from casckpt.tensors.plain_torch import TORCH_EXTENSIONS

P = TypeVar("P")
MAGIC: Final = b"casckpt plain data\n"


def has_methods_of(planner: object, default: type[P], *names: str) -> TypeGuard[P]:
    """Tell whether a planner is one of DCP's ``default``, or of a subclass that has these methods of it."""
    same = (getattr(type(planner), name, None) is getattr(default, name) for name in names)
    return isinstance(planner, default) and all(same)


class ValueStream(io.BytesIO):
    """A value on its way between planner and storage. As bytes: plain data, or nothing where it is not plain."""

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            data = MAGIC + plain.encode(value, extensions=TORCH_EXTENSIONS)
        except InvalidInput:
            data = b""
        super().__init__(data)


def value_of(stream: io.BytesIO) -> Any:
    """The value of a `ValueStream`, or of a copy of its bytes. Raises InvalidInput for any other bytes."""
    if isinstance(stream, ValueStream):
        return stream.value
    data = stream.getvalue()
    if not data.startswith(MAGIC):
        raise InvalidInput("PickleFreeLoadPlanner got bytes of another planner; load with StorageReader of casckpt")
    return plain.decode(data[len(MAGIC) :], extensions=TORCH_EXTENSIONS, strict=True)


class PickleFreeSavePlanner(DefaultSavePlanner):
    """DCP's default planner, but what is no tensor goes to the storage as it is: as plain data, never as a pickle.

    With `StorageWriter`. Values that are not plain data are refused, naming the key, unless the writer may pickle.
    """

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return ValueStream(object)
        found: torch.Tensor | io.BytesIO = super().transform_object(write_item, object)
        return found


class PickleFreeLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, but what is no tensor is taken as `StorageReader` has it: nothing is unpickled."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], value_of(value))
        else:
            self.state_dict[key] = value_of(value)
