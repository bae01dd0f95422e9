"""Keys of a template that share memory. The checkpoint must hold the same values for them.

Tensors with the same elements in the same order are compared by the digests of their cells when they are added. Other
overlaps are found at the end, by ranges of bytes. Such tensors, and tensors whose cells are cut differently, are read
into memory of the same layout and compared there. Few templates have any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from casckpt.errors import Mismatch
from casckpt.format.extents import ExtentTable
from casckpt.format.regions import Region, intersect, normalise
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.plan.reads import plan_units
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import Destination

_MOST_WORK = 10_000  # for numpy, to find out whether two layouts share an element
_ALIGNMENT = 16  # bytes: of the largest element

Form: TypeAlias = tuple[object, ...]
"""A key that is equal for tensors with the same elements of memory in the same order."""


class Content(NamedTuple):
    """The data that is read into a tensor's memory: a ``region`` of an entry (by number), stored as ``dtype``.

    It is a tuple, because a load makes one for each tensor.
    """

    key: str
    data: torch.Tensor
    entry: int
    dtype: str
    table: ExtentTable
    region: Region


@dataclass
class TiedTensors:
    """The memory that the tensors of a template fill."""

    _held: dict[int, Content] = field(default_factory=dict)  # the first at each address
    _forms: dict[Form, Content] = field(default_factory=dict)  # the first of each other form there
    _undecided: list[tuple[Content, Content]] = field(default_factory=list)  # digests do not say if they differ
    _second: set[Form] = field(default_factory=set)  # forms of contents that overlap with another content

    def add(self, content: Content) -> None:
        """Add memory that will be filled.

        Raises Mismatch if digests show that another key fills the same memory with other values. If both were
        read, the order of the threads would decide which one stays, and the other would look damaged.
        """
        other = self._held.setdefault(content.data.data_ptr(), content)
        if other is not content and _form(other.data) != _form(content.data):
            other = self._forms.setdefault(_form(content.data), content)
        if other is content:
            return
        differ = _differ(other, content)
        if differ:
            raise _mismatch(other, content)
        if differ is None:
            self._undecided.append((other, content))

    def has(self, data: torch.Tensor) -> bool:
        """Return whether this memory is filled."""
        first = self._held.get(data.data_ptr())
        return first is not None and (_form(first.data) == _form(data) or _form(data) in self._forms)

    def check(self, reader: EntryReader) -> None:
        """Raise Mismatch if any memory would be filled with different values, before any of it is filled.

        If digests do not show whether tensors differ, ``reader`` reads them. Raises the errors of the reader.
        """
        for one, other in (*self._undecided, *self._overlapping()):
            if _read_differently(reader, one, other):
                raise _mismatch(one, other)
            self._second.add(_form(other.data))

    def in_turns(self, wants: Sequence[RegionRequest]) -> tuple[list[RegionRequest], list[RegionRequest]]:
        """Split into requests that may run together, and requests that must run after them, one by one.

        The memory of the latter overlaps with other memory. If they ran in parallel, a cell that is decoded in
        place could be overwritten.
        """
        turns: tuple[list[RegionRequest], list[RegionRequest]] = ([], [])
        for want in wants:
            turns[bool(self._second) and _form(want.sink.data) in self._second].append(want)
        return turns

    def _overlapping(self) -> Iterator[tuple[Content, Content]]:
        """Yield all pairs of different forms that share an element."""
        if not self._forms and self._are_apart():
            return
        contents = [*self._held.values(), *self._forms.values()]
        ranges = sorted((*_bytes_of(content.data), number) for number, content in enumerate(contents))
        before: list[tuple[int, int]] = []
        for lo, hi, number in ranges:
            before = [earlier for earlier in before if earlier[0] > lo]
            for _, other in before:
                if _share(contents[number].data, contents[other].data):
                    yield contents[min(number, other)], contents[max(number, other)]
            before.append((hi, number))

    def _are_apart(self) -> bool:
        """Return whether no ranges of bytes overlap, as in most states."""
        end = 0
        for address in sorted(self._held):
            if address < end:
                return False
            data = self._held[address].data
            end = address + data.nbytes if data.is_contiguous() else _bytes_of(data)[1]
        return True


def _form(data: torch.Tensor) -> Form:
    return data.data_ptr(), data.shape, data.stride(), data.dtype, data.device, data.is_conj(), data.is_neg()


def _bytes_of(data: torch.Tensor) -> tuple[int, int]:
    """Return the range of addresses of the elements."""
    last = sum((extent - 1) * stride for extent, stride in zip(data.shape, data.stride(), strict=True))
    return data.data_ptr(), data.data_ptr() + (1 + last) * data.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share an element. True if that takes too long to find out."""
    arrays = [np.asarray(SimpleNamespace(__array_interface__=_interface(data))) for data in (one, other)]
    try:
        return one.device == other.device and np.shares_memory(arrays[0], arrays[1], max_work=_MOST_WORK)  # type: ignore[arg-type] # numpy takes any bound
    except np.exceptions.TooHardError:
        return True


def _interface(data: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor on any device to numpy, which only compares addresses."""
    size, address = data.element_size(), data.data_ptr()
    strides = tuple(stride * size for stride in data.stride())
    return {"version": 3, "typestr": f"|V{size}", "data": (address, True), "shape": data.shape, "strides": strides}


def _differ(one: Content, other: Content) -> bool | None:
    """Return whether two contents of the same memory differ in a cell. None if digests do not show it."""
    first, second = (normalise(content.region, content.table.shape) for content in (one, other))
    if (first, one.dtype) != (second, other.dtype):
        return None
    if one.table is other.table:
        return False
    digests = {unit[3:6]: unit.digest for unit in plan_units(one.table, first, verify=True)}
    unlike = [unit for unit in plan_units(other.table, second, verify=True) if digests.get(unit[3:6]) != unit.digest]
    inside = [unit for unit in unlike if sum(box.numel for box in intersect(unit.region, second)) == unit.region.numel]
    return any(unit[3:6] in digests for unit in inside) or (None if unlike else False)


def _read_differently(reader: EntryReader, one: Content, other: Content) -> bool:
    """Read two contents into memory of the same layout, and return whether they differ where they overlap."""
    if any(content.data.data_ptr() % content.data.element_size() for content in (one, other)):
        return True  # unaligned tensors, such as torch.frombuffer makes, have no counterpart in aligned memory
    ranges = [_bytes_of(content.data) for content in (one, other)]
    base = min(lo for lo, _ in ranges) // _ALIGNMENT * _ALIGNMENT
    nbytes = -(-(max(hi for _, hi in ranges) - base) // _ALIGNMENT) * _ALIGNMENT
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    _fill(reader, other, memory, base)
    data, size = other.data, other.data.element_size()
    filled = memory.as_strided((*data.shape, size), (*(n * size for n in data.stride()), 1), data.data_ptr() - base)
    before = filled.clone()
    _fill(reader, one, memory, base)  # changes elements of `other` only if they differ
    return not torch.equal(filled, before)


def _fill(reader: EntryReader, content: Content, memory: torch.Tensor, base: int) -> None:
    """Read a content into ``memory``, in place of the memory at the address ``base``."""
    data = content.data
    view = memory.view(data.dtype).as_strided(
        data.shape, data.stride(), (data.data_ptr() - base) // data.element_size()
    )
    view = view.conj() if data.is_conj() else view
    view = torch._neg_view(view) if data.is_neg() else view
    sink = Destination(content.region, view, torch_dtype(content.dtype))
    reader.fill([RegionRequest(content.entry, sink, content.table, True)])


def _mismatch(one: Content, other: Content) -> Mismatch:
    return Mismatch(
        f"{one.key!r} and {other.key!r} share memory here, but the checkpoint holds different values for them; "
        "untie them, or leave one of them out",
        key=other.key,
        keys=(one.key, other.key),
    )
