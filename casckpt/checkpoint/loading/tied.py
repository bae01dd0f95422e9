"""Keys of a template that share memory: what the checkpoint holds for them must be the same.

Two that are the same elements in the same order are found as they are added. What else overlaps is found at the end, by
the ranges of their bytes. Whether both hold the same is told by the digests of their cells; where these do not tell,
because the cells are cut otherwise or lie otherwise in memory, both are read, into memory of the same layout.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from casckpt.checkpoint.loading.download import Download, StreamRequest
from casckpt.errors import Mismatch
from casckpt.format.extents import ExtentTable
from casckpt.format.regions import Region, intersect, normalise
from casckpt.plan.reads import Unit, plan_units
from casckpt.tensors.dtypes import dtype_name, torch_dtype
from casckpt.tensors.memory import Destination

_MOST_WORK = 10_000  # of numpy, to find out whether two layouts have an element in common
_ALIGNMENT = 16  # bytes: of the largest element

Form: TypeAlias = tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...], bool, bool]


class Content(NamedTuple):
    """What is to be read into the memory of a tensor. A tuple, because a load makes one for each of its tensors.

    ``region`` of the tensor with the number ``entry``, which is stored as ``dtype``.
    """

    key: str
    data: torch.Tensor
    entry: int
    dtype: str
    table: ExtentTable
    region: Region


@dataclass
class Tied:
    """The memory that the tensors of a template fill."""

    _held: dict[int, list[Content]] = field(default_factory=dict)  # by address: the first of each form
    _untold: list[tuple[Content, Content]] = field(default_factory=list)

    def add(self, content: Content) -> None:
        """Note what is to be filled.

        Raises Mismatch if digests tell that another key fills the same memory with something else: of two that are read
        at the same time nobody knows which one stays, and the other would be taken for damaged.
        """
        data = content.data
        address = data.data_ptr()
        beside = self._held.get(address)
        if beside is None:
            self._held[address] = [content]
            return
        form = _form(data)
        other = next((one for one in beside if _form(one.data) == form), None)
        if other is None:
            beside.append(content)
            return
        differ = _differ(other, content)
        if differ:
            raise _mismatch(other, content)
        if differ is None:
            self._untold.append((other, content))

    def has(self, data: torch.Tensor) -> bool:
        """Whether this memory is filled."""
        beside = self._held.get(data.data_ptr(), ())
        return any(_form(one.data) == _form(data) for one in beside)

    def check(self, download: Download) -> None:
        """Raise Mismatch if any memory would be filled with different values, before any of it is filled.

        Raises what ``download`` raises, by which those are read of which digests do not tell it.
        """
        overlapping = ((one, other, _differ(one, other)) for one, other in self._overlapping())
        untold = ((one, other, None) for one, other in self._untold)
        for one, other, differ in (*untold, *overlapping):
            if differ or (differ is None and _read_differently(download, one, other)):
                raise _mismatch(one, other)

    def _overlapping(self) -> Iterator[tuple[Content, Content]]:
        """Yield all pairs of different forms that have an element in common."""
        contents = [content for beside in self._held.values() for content in beside]
        ranges = sorted((*_bytes_of(content.data), number) for number, content in enumerate(contents))
        before: list[tuple[int, Content]] = []
        last = 0
        for lo, hi, number in ranges:
            before = [(end, content) for end, content in before if end > lo] if lo < last else []
            yield from ((one, contents[number]) for _, one in before if _share(one.data, contents[number].data))
            before.append((hi, contents[number]))
            last = max(last, hi)


def _form(data: torch.Tensor) -> Form:
    """Return what is equal for tensors that begin at the same address and are the same elements in the same order."""
    return data.device, data.dtype, data.shape, data.stride(), data.is_conj(), data.is_neg()


def _bytes_of(data: torch.Tensor) -> tuple[int, int]:
    """Return the range of addresses in which the elements lie."""
    start, count = data.data_ptr(), data.numel()
    if not data.is_contiguous():
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(data.shape, data.stride(), strict=True))
    return start, start + count * data.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have an element in common; where that takes long to find out, they may have."""
    arrays = [np.asarray(SimpleNamespace(__array_interface__=_interface(data))) for data in (one, other)]
    try:
        return one.device == other.device and np.shares_memory(arrays[0], arrays[1], max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def _interface(data: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor on any device to numpy, which looks at addresses only."""
    size, address = data.element_size(), data.data_ptr()
    strides = tuple(stride * size for stride in data.stride())
    return {"version": 3, "typestr": f"|V{size}", "data": (address, True), "shape": data.shape, "strides": strides}


def _differ(one: Content, other: Content) -> bool | None:
    """Tell by digests whether two contents differ in a cell of the memory in common; None if that cannot be told."""
    (lo, hi), (start, end) = _bytes_of(one.data), _bytes_of(other.data)
    lo, hi = max(lo, start), min(hi, end)
    first, second = (normalise(content.region, content.table.shape) for content in (one, other))
    alike = (_form(one.data), start, first, one.dtype) == (_form(other.data), one.data.data_ptr(), second, other.dtype)
    if alike and one.table is other.table:
        return False
    if not alike and not (_is_flat(one) and _is_flat(other)):
        return None
    digests = {place: unit.digest for place, unit, _ in _cells(one, first, lo, hi)}
    told = True
    for place, unit, is_inside in _cells(other, second, lo, hi):
        is_same = digests.get(place) == unit.digest
        if place in digests and not is_same and is_inside:
            return True
        told = told and is_same
    return False if told else None


def _is_flat(content: Content) -> bool:
    """Tell whether the bytes in memory are those that are stored, in their order."""
    data = content.data
    return data.is_contiguous() and not data.is_conj() and not data.is_neg() and dtype_name(data.dtype) == content.dtype


def _cells(content: Content, region: Region, lo: int, hi: int) -> Iterator[tuple[Hashable, Unit, bool]]:
    """Yield the cells with bytes in [lo, hi), and the place of each, and whether it is all in there.

    The place is an address where the cells follow each other in memory, else it has a meaning only for one region.
    """
    size = content.table.itemsize
    start = content.data.data_ptr() - region.lo * size
    for unit in plan_units(content.table, region, verify=True):
        if unit.box != region.box or not _is_flat(content):
            is_inside = sum(box.numel for box in intersect(unit.region, region)) == unit.region.numel
            yield (unit.box, unit.lo, unit.hi, content.dtype), unit, is_inside
        elif start + unit.hi * size > lo and start + unit.lo * size < hi:
            begin, end = start + unit.lo * size, start + unit.hi * size
            yield (begin, end), unit, lo <= begin and end <= hi


def _read_differently(download: Download, one: Content, other: Content) -> bool:
    """Tell whether two contents differ in what they have in common, by reading both into memory of their layout."""
    ranges = [_bytes_of(content.data) for content in (one, other)]
    base = min(lo for lo, _ in ranges) // _ALIGNMENT * _ALIGNMENT
    memory = torch.zeros(-(-(max(hi for _, hi in ranges) - base) // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
    _fill(download, other, memory, base)
    size, strides = other.data.element_size(), other.data.stride()
    mine = memory.as_strided(
        (*other.data.shape, size), (*(stride * size for stride in strides), 1), other.data.data_ptr() - base
    )
    before = mine.clone()
    _fill(download, one, memory, base)  # changes of what `other` has filled only what differs
    return not torch.equal(mine, before)


def _fill(download: Download, content: Content, memory: torch.Tensor, base: int) -> None:
    """Read a content into ``memory``, which stands for the memory at the address ``base``."""
    data = content.data
    view = memory.view(data.dtype).as_strided(
        data.shape, data.stride(), (data.data_ptr() - base) // data.element_size()
    )
    view = view.conj() if data.is_conj() else view
    view = torch._neg_view(view) if data.is_neg() else view
    sink = Destination(content.region, view, torch_dtype(content.dtype))
    download.run([StreamRequest(content.entry, sink, content.table, True)])


def _mismatch(one: Content, other: Content) -> Mismatch:
    return Mismatch(
        f"{one.key!r} and {other.key!r} share memory here, but the checkpoint holds different values for them; "
        "untie them, or leave one of them out",
        key=other.key,
        keys=(one.key, other.key),
    )
