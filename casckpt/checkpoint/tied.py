"""Keys of a template that share memory: what the checkpoint holds for them must be the same."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from casckpt.errors import Mismatch
from casckpt.format.extents import ExtentTable
from casckpt.format.regions import Region
from casckpt.plan.reads import plan_units


@dataclass(frozen=True, slots=True)
class _Content:
    """What is to be read into some memory."""

    key: str
    dtype: str
    table: ExtentTable
    region: Region


@dataclass
class Tied:
    """The memory that the tensors of a template fill."""

    _held: dict[Hashable, _Content] = field(default_factory=dict)

    def add(self, key: str, data: torch.Tensor, dtype: str, table: ExtentTable, region: Region) -> None:
        """``data`` of ``key`` is to be filled with ``region`` of a tensor that is stored as ``dtype``.

        Raises Mismatch if another key fills the same memory with something else: of two that are read at the same time
        nobody knows which one stays, and the other would be taken for damaged.
        """
        content = _Content(key, dtype, table, region)
        place = (data.device, data.data_ptr(), data.dtype, data.shape, data.stride())
        other = self._held.setdefault(place, content)
        if _differ(other, content):
            raise Mismatch(
                f"{other.key!r} and {key!r} share memory here, but the checkpoint holds different values for them; "
                "untie them, or leave one of them out",
                key=key,
                keys=(other.key, key),
            )


def _differ(one: _Content, other: _Content) -> bool:
    """Do two contents differ in a cell? Of those that are cut into other cells nobody knows."""
    if one.table is other.table or one.dtype != other.dtype:
        return False
    digests = {unit[3:6]: unit.digest for unit in plan_units(one.table, one.region, verify=True)}
    units = plan_units(other.table, other.region, verify=True)
    return any(digests.get(unit[3:6], unit.digest) != unit.digest for unit in units)
