"""Splits tensors of a view, without moving data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from casckpt.errors import InvalidInput
from casckpt.format.dtypes import itemsize
from casckpt.format.regions import Shape, strides
from casckpt.format.sections.index import Entry
from casckpt.loading.options import compiled, expanded, first_match
from casckpt.loading.regions import EntrySlice, is_castable

Index: TypeAlias = Sequence[int | Sequence[int]]
"""An index of a tensor: for each of its first dimensions, a number, or the first and the last index plus 1."""
Parts: TypeAlias = Mapping[str, Index]
"""The names of the parts, and their indices."""
Split: TypeAlias = Mapping[str, Parts]
"""Maps a regular expression for a whole name to the parts."""

_MOST_RUNS = 100_000  # of consecutive elements in one part


class ViewTensor(NamedTuple):
    """A tensor from a checkpoint, and its name in a view.

    ``parts``: for a part of a tensor, its slices in order. In that case, ``entry`` is the entry of the tensor, but with
    the shape of the part.
    """

    name: str
    entry: Entry
    parts: tuple[EntrySlice, ...] = ()

    @property
    def sources(self) -> tuple[EntrySlice, ...]:
        """The slices that hold the elements of the tensor, in row-major order."""
        return self.parts or (EntrySlice(self.entry, 0, self.entry.numel),)

    def cast(self, dtype: str | None) -> ViewTensor:
        """Return the tensor in another dtype, if it `is_castable`."""
        if dtype is None or not is_castable(self.entry):
            return self
        return self._replace(entry=self.entry.converted(dtype, itemsize(dtype)), parts=self.sources)


def sources_of(tensors: Iterable[ViewTensor]) -> Iterator[EntrySlice]:
    """Yield the slices that hold the elements of ``tensors``, in order."""
    return (source for tensor in tensors for source in tensor.sources)


def recut(tensors: Iterable[ViewTensor], split: Split) -> list[ViewTensor]:
    """Split the tensors that ``split`` matches.

    Raises InvalidInput, naming the tensor, for parts that do not match, and for a string that is not a valid regular
    expression.
    """
    rules = compiled(split)
    return [part for tensor in tensors for part in _split(tensor, first_match(rules, tensor.name))]


def _split(tensor: ViewTensor, rule: tuple[re.Match[str], Parts] | None) -> Iterator[ViewTensor]:
    if rule is None:
        yield tensor
        return
    match, parts = rule
    shape, left = tensor.entry.shape, tensor.entry.numel
    for saved, index in parts.items():
        name = expanded(match, saved)
        ranges = [(place, place + 1) if isinstance(place, int) else (place[0], place[-1]) for place in index]
        ranges += [(0, extent) for extent in shape[len(index) :]]
        spans = zip(ranges, shape, strict=True)
        is_inside = len(index) <= len(shape) and all(0 <= lo < hi <= extent for (lo, hi), extent in spans)
        runs = list(_runs(ranges, shape)) if is_inside else []
        left -= sum(hi - lo for lo, hi in runs)
        if not runs or left < 0:
            raise InvalidInput(
                f"{tensor.name!r} of shape {shape} has no part {list(index)!r:.80} for {name!r}, or its parts have "
                "more elements than the tensor",
                key=tensor.name,
            )
        part = [hi - lo for lo, hi in ranges]
        for dim in reversed([dim for dim, place in enumerate(index) if isinstance(place, int)]):
            del part[dim]
        yield _made(name, tuple(part), [source for run in runs for source in _within(tensor.sources, *run)])


def _runs(ranges: Sequence[tuple[int, int]], shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive elements in a box. Yield nothing if there are too many."""
    last = max((dim for dim, pair in enumerate(ranges) if pair != (0, shape[dim])), default=-1)
    outer, steps = ranges[: max(last, 0)], strides(shape)
    if prod(hi - lo for lo, hi in outer) > _MOST_RUNS:
        return
    lo, hi = (ranges[last][0] * steps[last], ranges[last][1] * steps[last]) if last >= 0 else (0, prod(shape))
    for place in product(*(range(*pair) for pair in outer)):
        start = sum(index * step for index, step in zip(place, steps, strict=False))
        yield start + lo, start + hi


def _within(sources: Iterable[EntrySlice], lo: int, hi: int) -> Iterator[EntrySlice]:
    """Yield the slices of the elements [lo, hi) in ``sources``."""
    for source in sources:
        count = source.hi - source.lo
        if lo < count and hi > 0:
            yield source._replace(lo=source.lo + max(lo, 0), hi=source.lo + min(hi, count))
        lo, hi = lo - count, hi - count


def _made(name: str, shape: Shape, sources: Sequence[EntrySlice]) -> ViewTensor:
    if not sources or prod(shape) != sum(source.hi - source.lo for source in sources):
        raise InvalidInput(f"{name!r} would have no elements", key=name)
    first = sources[0].entry
    entry = Entry(first.kind, first.key, first.index, first.rank, first.dtype, first.itemsize, shape, first.number)
    return ViewTensor(name, entry, tuple(sources))
