"""Template keys that share memory, for which the checkpoint must hold the same values.

Tensors with the same elements in the same order are compared by cell digests when they are added. All other overlaps
are found at the end, by byte range. Tensors that overlap in this way, and tensors that are divided into cells
differently, are read into memory of the same layout and compared there. Few templates have such tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch

from casckpt.errors import Mismatch
from casckpt.format.light import LightStruct
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Region, intersect, normalise
from casckpt.format.sections.index import Entry
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.plan.reads import plan_units
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import Destination

_MOST_WORK = 10_000  # numpy's limit when it checks whether two layouts share an element
_ALIGNMENT = 16  # the size of the largest element, in bytes

Form: TypeAlias = tuple[object, ...]
"""A key that is the same for all tensors with the same elements of memory in the same order."""


class Content(LightStruct, frozen=True):
    """The data that is read into a tensor's memory: a ``region`` of an entry."""

    key: str
    data: torch.Tensor
    entry: Entry
    region: Region


@dataclass
class TiedTensors:
    """The memory that belongs to the tensors of a template, which is filled from ``manifest``."""

    manifest: Manifest
    _held: dict[int, Content] = field(default_factory=dict)  # the first content at each address
    _forms: dict[Form, Content] = field(default_factory=dict)  # the first content of each further form at an address
    _undecided: list[tuple[Content, Content]] = field(default_factory=list)  # digests do not show whether they differ
    _second: set[Form] = field(default_factory=set)  # the forms of contents that overlap an earlier content

    def add(self, content: Content) -> None:
        """Add memory that the load will fill.

        Raises Mismatch if digests show that a different key fills the same memory with different values. If both were
        read, the order of the threads would decide which value remains, and the other value would appear damaged.
        """
        other = self._held.setdefault(content.data.data_ptr(), content)
        if other is not content and _form(other.data) != _form(content.data):
            other = self._forms.setdefault(_form(content.data), content)
        if other is content:
            return
        differ = _differ(self.manifest, other, content)
        if differ:
            raise _mismatch(other, content)
        if differ is None:
            self._undecided.append((other, content))

    def has(self, data: torch.Tensor) -> bool:
        """Return whether the load fills this memory."""
        first = self._held.get(data.data_ptr())
        return first is not None and (_form(first.data) == _form(data) or _form(data) in self._forms)

    def check(self, reader: EntryReader) -> None:
        """Raise Mismatch if any memory would receive two different values. Fill nothing before this is known.

        If digests do not show whether tensors differ, ``reader`` reads the tensors. Raises the reader's errors.
        """
        for one, other in (*self._undecided, *self._overlapping()):
            if _read_differently(reader, one, other):
                raise _mismatch(one, other)
            self._second.add(_form(other.data))

    def in_turns(self, wants: Sequence[RegionRequest]) -> tuple[list[RegionRequest], list[RegionRequest]]:
        """Split the requests into those that may run together, and those that must run after them, one by one.

        The second group fills memory that overlaps other memory. If these requests ran in parallel, one could
        overwrite a cell while another decodes it in place.
        """
        if not self._second:
            return list(wants), []
        turns: tuple[list[RegionRequest], list[RegionRequest]] = ([], [])
        for want in wants:
            turns[_form(want.sink.data) in self._second].append(want)
        return turns

    def _overlapping(self) -> Iterator[tuple[Content, Content]]:
        """Yield all pairs of tensors that lie differently in memory and share an element."""
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
        """Return whether all byte ranges are disjoint, as in most states."""
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
    """Return the address range of the elements."""
    last = sum((extent - 1) * stride for extent, stride in zip(data.shape, data.stride(), strict=True))
    return data.data_ptr(), data.data_ptr() + (1 + last) * data.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share an element. Return True if the check would take too long."""
    arrays = [np.asarray(SimpleNamespace(__array_interface__=_interface(data))) for data in (one, other)]
    try:
        return one.device == other.device and np.shares_memory(arrays[0], arrays[1], max_work=_MOST_WORK)  # type: ignore[arg-type] # numpy takes any bound
    except np.exceptions.TooHardError:
        return True


def _interface(data: torch.Tensor) -> dict[str, Any]:
    """Return an array interface for a tensor on any device. numpy only compares its addresses."""
    size, address = data.element_size(), data.data_ptr()
    strides = tuple(stride * size for stride in data.stride())
    return {"version": 3, "typestr": f"|V{size}", "data": (address, True), "shape": data.shape, "strides": strides}


def _differ(manifest: Manifest, one: Content, other: Content) -> bool | None:
    """Return whether two contents of the same memory differ in a cell. Return None if digests do not show this."""
    first, second = (normalise(content.region, content.entry.shape) for content in (one, other))
    if (first, one.entry.dtype) != (second, other.entry.dtype):
        return None
    if one.entry is other.entry:
        return False
    known, units = (
        list(plan_units(manifest.extents(content.entry), region, verify=True))
        for content, region in ((one, first), (other, second))
    )
    digests = {unit[3:6]: unit.digest for unit in known}
    unlike = [unit for unit in units if digests.get(unit[3:6]) != unit.digest]
    inside = [unit for unit in unlike if sum(box.numel for box in intersect(unit.region, second)) == unit.region.numel]
    return any(unit[3:6] in digests for unit in inside) or (None if unlike else False)


def _read_differently(reader: EntryReader, one: Content, other: Content) -> bool:
    """Read two contents into memory of the same layout. Return whether they differ where they overlap."""
    if any(content.data.data_ptr() % content.data.element_size() for content in (one, other)):
        return True  # unaligned tensors, for example from torch.frombuffer, cannot be reproduced in aligned memory
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
    """Read a content into ``memory``, which stands in for the memory at the address ``base``."""
    data = content.data
    view = memory.view(data.dtype).as_strided(
        data.shape, data.stride(), (data.data_ptr() - base) // data.element_size()
    )
    view = view.conj() if data.is_conj() else view
    view = torch._neg_view(view) if data.is_neg() else view
    sink = Destination(content.region, view, torch_dtype(content.entry.dtype))
    reader.fill([RegionRequest(content.entry.number, sink, is_new=True)])


def _mismatch(one: Content, other: Content) -> Mismatch:
    return Mismatch(
        f"{one.key!r} and {other.key!r} share memory here, but the checkpoint holds different values "
        "for them: untie them (in a Transformers model: set tie_word_embeddings=False in its config, and create it "
        "again), or leave one of them out",
        key=other.key,
        keys=(one.key, other.key),
    )
