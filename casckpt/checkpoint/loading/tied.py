"""Keys of a template that share memory: what the checkpoint holds for them must be the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from casckpt.errors import Mismatch
from casckpt.format.extents import ExtentTable
from casckpt.format.regions import Region
from casckpt.plan.reads import plan_units


class _Content(NamedTuple):
    """What is to be read into the memory of a tensor. A tuple, because a load makes one for each of its tensors."""

    key: str
    data: torch.Tensor
    dtype: str
    table: ExtentTable
    region: Region


@dataclass
class Tied:
    """The memory that the tensors of a template fill."""

    _held: dict[int, list[_Content]] = field(default_factory=dict)  # by address: the first of each memory

    def add(self, key: str, data: torch.Tensor, dtype: str, table: ExtentTable, region: Region) -> None:
        """``data`` of ``key`` is to be filled with ``region`` of a tensor that is stored as ``dtype``.

        Raises Mismatch if another key fills the same memory with something else: of two that are read at the same time
        nobody knows which one stays, and the other would be taken for damaged.
        """
        content = _Content(key, data, dtype, table, region)
        address = data.data_ptr()
        beside = self._held.get(address)
        if beside is None:
            self._held[address] = [content]
            return
        other = next((one for one in beside if _same_memory(one.data, data)), None)
        if other is None:
            beside.append(content)
        elif _differ(other, content):
            raise Mismatch(
                f"{other.key!r} and {key!r} share memory here, but the checkpoint holds different values for them; "
                "untie them, or leave one of them out",
                key=key,
                keys=(other.key, key),
            )

    def has(self, data: torch.Tensor) -> bool:
        """Whether this memory is filled."""
        return any(_same_memory(one.data, data) for one in self._held.get(data.data_ptr(), ()))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that begin at the same address are the same elements, in the same order."""
    return (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride())


def _differ(one: _Content, other: _Content) -> bool:
    """Whether two contents differ in a cell; of those that are cut into other cells nobody knows."""
    if one.table is other.table or one.dtype != other.dtype:
        return False
    digests = {unit[3:6]: unit.digest for unit in plan_units(one.table, one.region, verify=True)}
    units = plan_units(other.table, other.region, verify=True)
    return any(digests.get(unit[3:6], unit.digest) != unit.digest for unit in units)
