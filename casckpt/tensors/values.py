"""`Shard`, `PerRank` and `OfObjects`: wrappers that say how ranks hold a value and how a save reads a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any, TypeAlias

import torch

from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region, Shape, check_shape, full_box

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Shard:
    """A part of a global tensor that this rank holds. All numbers count elements, not bytes.

    ``offset`` and ``shape``: a box of the global tensor. Without ``offset``, it is the whole tensor. Without
    ``shape``, it has the shape of ``data``. ``flat``: a range ``(lo, hi)`` in the row-major order of that box, or a
    list of ranges in the order of ``data``. In this case, ``data`` may have any shape with the same number of
    elements. ``replicated``: all ranks that hold these elements have the same values and share the writing. Otherwise,
    the lowest of these ranks writes them. Raises InvalidInput if the numbers do not match.
    """

    data: torch.Tensor
    global_shape: Shape
    offset: Shape
    shape: Shape
    flat: tuple[Range, ...] | None
    replicated: bool

    def __init__(
        self,
        data: torch.Tensor,
        global_shape: Sequence[int],
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        flat: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        replicated: bool = False,
    ) -> None:
        if not isinstance(data, torch.Tensor):
            raise InvalidInput(f"the data of a Shard must be a tensor, not a {type(data).__name__}")
        whole = check_shape(_numbers("global_shape", global_shape))
        if offset is not None and shape is None and flat is not None:
            raise InvalidInput(
                "a Shard with offset and flat also needs shape: the shape of the box that flat refers to"
            )
        sides = tuple(data.shape) if offset is not None else whole
        box = _box(whole, offset, sides if shape is None else _numbers("shape", shape))
        ranges = None if flat is None else _ranges(flat)
        _check_data(data, box, ranges)
        # this is how a frozen dataclass can set its own fields
        for name, value in (("global_shape", whole), ("offset", box.offset), ("shape", box.shape), ("flat", ranges)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "replicated", bool(replicated))

    @property
    def box(self) -> Box:
        """The box, which defaults to the whole tensor."""
        return Box(self.offset, self.shape)

    def regions(self) -> list[Region]:
        """Return the regions in the order of ``data``, without empty ones."""
        box = self.box
        ranges = ((0, box.numel),) if self.flat is None else self.flat
        return [Region(box, lo, hi) for lo, hi in ranges if lo < hi]

    def __repr__(self) -> str:
        where = " + ".join(map(str, self.regions())) or "nothing"
        return f"Shard({where} of {list(self.global_shape)}, {self.data.dtype})"


@dataclass(frozen=True)
class PerRank:
    """A value that each rank stores separately.

    If a load has more ranks than the save, the additional ranks receive rank 0's value.
    """

    value: Any

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class OfObjects(dict[Any, Any]):
    """A state that objects returned. Objects inside it are plain values: a save does not call their state_dict."""


def _numbers(name: str, numbers: Sequence[int]) -> Shape:
    try:
        return tuple(index(number) for number in numbers)
    except TypeError as error:
        raise InvalidInput(f"{name} of a Shard must be a sequence of ints, not {numbers!r:.100}") from error


def _box(whole: Shape, offset: Sequence[int] | None, shape: Shape) -> Box:
    if offset is None:
        if shape != whole:
            raise InvalidInput(f"a Shard of shape {list(shape)} in {list(whole)} needs an offset")
        return full_box(whole)
    box = Box(_numbers("offset", offset), shape)
    if len(shape) != len(whole) or not box.inside(full_box(whole)):
        raise InvalidInput(
            f"a box at {list(box.offset)} of shape {list(shape)} is outside a tensor of shape {list(whole)}"
        )
    return box


def _ranges(flat: Any) -> tuple[Range, ...]:
    """Return one or more ranges as pairs."""
    items = list(flat) if isinstance(flat, Iterable) else [flat]
    if len(items) == 2 and not any(isinstance(item, Sequence) for item in items):
        items = [tuple(items)]
    pairs = [_numbers("flat", item) if isinstance(item, Sequence) else () for item in items]
    if any(len(pair) != 2 for pair in pairs):
        raise InvalidInput(f"flat of a Shard must be (lo, hi) or a list of such ranges, not {flat!r:.100}")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _check_data(data: torch.Tensor, box: Box, ranges: tuple[Range, ...] | None) -> None:
    if ranges is not None:
        _check_ranges(ranges, box, data.numel())
    elif tuple(data.shape) != box.shape:
        raise InvalidInput(
            f"data of shape {list(data.shape)} does not fill a box of shape {list(box.shape)}; pass offset and "
            f"shape, or flat"
        )


def _check_ranges(ranges: tuple[Range, ...], box: Box, numel: int) -> None:
    for lo, hi in ranges:
        Region(box, lo, hi)  # raises if it is outside the box
    for (_, end), (start, _) in pairwise(sorted(pair for pair in ranges if pair[0] < pair[1])):
        if start < end:
            raise InvalidInput(f"flat ranges of a Shard overlap: one ends at {end}, but the next starts at {start}")
    total = sum(hi - lo for lo, hi in ranges)
    if total != numel:
        raise InvalidInput(
            f"flat ranges with {total} elements in total do not match data with {numel} elements (in a box of "
            f"{box.numel})"
        )
