"""Tensors of a view cut apart, or put together, along their first dimension: no data moves for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

from casckpt.errors import InvalidInput
from casckpt.format.regions import Shape
from casckpt.format.sections.index import Entry
from casckpt.loading.arguments import FullMatch
from casckpt.loading.regions import EntrySlice

T = TypeVar("T")
Split: TypeAlias = Mapping[str, Sequence[str] | Mapping[str, int]]
"""From a regular expression, matched against a whole name, to the names of equal parts, or of shares so large."""
Concat: TypeAlias = Mapping[str, Sequence[str]]
"""From one that the first matches to the name of the whole, and those of all that come behind the first."""


class ViewTensor(NamedTuple):
    """A stream of a checkpoint, and the name that it is seen under.

    ``parts``: of a tensor that was split or concatenated, where its elements lie, one part behind the other; ``entry``
    has its shape then, and is that of the first part in all else.
    """

    name: str
    entry: Entry
    parts: tuple[EntrySlice, ...] = ()

    @property
    def sources(self) -> tuple[EntrySlice, ...]:
        """Where its elements lie, in row-major order."""
        return self.parts or (EntrySlice(self.entry, 0, self.entry.numel),)


def recut(
    tensors: Iterable[ViewTensor], split: Split, concat: Concat, fullmatch: FullMatch = re.Pattern.fullmatch
) -> list[ViewTensor]:
    """Cut apart what ``split`` names, then put together what ``concat`` does. ``fullmatch``: matches expressions.

    Raises InvalidInput, naming the tensor, for parts that do not fit, and for an expression that is none.
    """
    found = [part for one in tensors for part in _cut(one, split, fullmatch)]
    return list(_joined(found, concat, fullmatch))


def _cut(one: ViewTensor, rules: Split, fullmatch: FullMatch) -> Iterator[ViewTensor]:
    match, names = _first_match(rules, one.name, fullmatch)
    if match is None or names is None:
        yield one
        return
    shares = names.items() if isinstance(names, Mapping) else [(name, 1) for name in names]
    yield from _shares(one, [(_expanded(match, name), share) for name, share in shares])


def _shares(one: ViewTensor, shares: Sequence[tuple[str, int]]) -> Iterator[ViewTensor]:
    shape = one.entry.shape
    total = sum(share for _, share in shares)
    if not shape or not shares or min(share for _, share in shares) < 1 or shape[0] % total:
        raise InvalidInput(
            f"{one.name!r} of shape {shape} cannot be split into {total} shares of its rows", key=one.name
        )
    unit = one.entry.numel // total
    for (name, share), (lo, hi) in zip(shares, pairwise(accumulate((n for _, n in shares), initial=0)), strict=True):
        rows = (shape[0] // total * share, *shape[1:])
        yield _made(name, rows, list(_within(one.sources, lo * unit, hi * unit)))


def _within(sources: Iterable[EntrySlice], lo: int, hi: int) -> Iterator[EntrySlice]:
    """Elements [lo, hi) of what lies in ``sources``."""
    for one in sources:
        count = one.hi - one.lo
        if lo < count and hi > 0:
            yield one._replace(lo=one.lo + max(lo, 0), hi=one.lo + min(hi, count))
        lo, hi = lo - count, hi - count


def _joined(tensors: Sequence[ViewTensor], rules: Concat, fullmatch: FullMatch) -> Iterator[ViewTensor]:
    by_name = {one.name: one for one in tensors}
    made, used = [], set[str]()
    for one in tensors:
        match, names = _first_match(rules, one.name, fullmatch)
        if match is None or names is None:
            continue
        whole, *others = (_expanded(match, name) for name in names)
        parts = [one, *(_named(by_name, other, whole) for other in others)]
        made.append(_put_together(whole, parts))
        used.update(part.name for part in parts)
    yield from (one for one in tensors if one.name not in used)
    yield from made


def _put_together(name: str, parts: Sequence[ViewTensor]) -> ViewTensor:
    first = parts[0].entry
    for part in parts:
        if not part.entry.shape or (part.entry.dtype, part.entry.shape[1:]) != (first.dtype, first.shape[1:]):
            raise InvalidInput(f"{part.name!r} has another dtype, or rows of another shape, than {parts[0].name!r}: "
                               f"they cannot be put together as {name!r}", key=part.name)  # fmt: skip
    rows = sum(part.entry.shape[0] for part in parts)
    return _made(name, (rows, *first.shape[1:]), [source for part in parts for source in part.sources])


def _named(by_name: Mapping[str, ViewTensor], name: str, whole: str) -> ViewTensor:
    if name not in by_name:
        raise InvalidInput(f"there is no tensor {name!r}, which is to be a part of {whole!r}", key=name)
    return by_name[name]


def _made(name: str, shape: Shape, sources: Sequence[EntrySlice]) -> ViewTensor:
    if not sources or prod(shape) != sum(source.hi - source.lo for source in sources):
        raise InvalidInput(f"{name!r} would have no elements", key=name)
    one = sources[0].entry
    entry = Entry(one.kind, one.key, one.index, one.rank, one.dtype, one.itemsize, shape, one.number)
    return ViewTensor(name, entry, tuple(sources))


def _first_match(rules: Mapping[str, T], name: str, fullmatch: FullMatch) -> tuple[re.Match[str] | None, T | None]:
    for pattern, names in rules.items():
        try:
            match = fullmatch(re.compile(pattern), name)
        except re.error as error:
            raise InvalidInput(f"{pattern!r:.80} is no regular expression: {error}") from error
        if match:
            return match, names
    return None, None


def _expanded(match: re.Match[str], name: str) -> str:
    try:
        return match.expand(name)
    except (re.error, IndexError) as error:
        raise InvalidInput(f"{name!r:.80} is no replacement for {match.re.pattern!r:.80}: {error}") from error
