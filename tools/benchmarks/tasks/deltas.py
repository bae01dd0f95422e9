"""States of real trainings, coded: alone, and since an earlier version. All that is coded is decoded and compared."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Measured
from benchmarks.tasks.coders import Coder, Ours, coder, view
from benchmarks.traces import Flat, Tensor, Trace, cut
from benchmarks.worker import WrongBytes
from casckpt.format.digest import cell_digest
from casckpt.format.encodings import form_of, needs_base, undo
from casckpt.plan.bases import choose_base

if TYPE_CHECKING:
    from benchmarks.worker import Here

_KEPT = 8  # versions, by the policy of a gc whose rest is counted
_LOADED = 4  # one version in so many is loaded
_OURS = Ours()


def make(here: Here, folder: str, name: str) -> tuple[int, ...]:
    """Make a trace if it is not there: its steps with whole states. It is a training of some minutes."""
    return _trace(here, folder, name).index.steps


def code(
    here: Here, *, folder: str, name: str, who: str, parts: Sequence[str], step: int, since: int | None, matrices: bool
) -> Measured:
    """Code the parts of a state; of the weights what changed ``since``. Extra: the entropy bound of the changes."""
    trace, using, clock = _trace(here, folder, name), coder(who), _Clock()
    measured, whole = Measured(), 0
    for part in parts:
        earlier = since if part == "weights" else None
        plain, base = trace.part(step, part), None if earlier is None else trace.part(earlier, part)
        pieces = _pieces(trace, plain.itemsize, using, matrices=matrices)
        measured.stored += sum(_coded(using, plain[piece], None if base is None else base[piece], clock)
                               for piece in pieces)  # fmt: skip
        whole += sum(plain[piece].nbytes for piece in pieces)
        if base is not None:
            both = [np.concatenate([one[piece] for piece in pieces]) for one in (base, plain)]
            measured.extra["bound"] = _bound(*both)
    return clock.write(measured, whole)


def speed(here: Here, *, folder: str, name: str, who: str, work: str, nbytes: int) -> Measured:
    """Encode or decode as many bytes of the weights' matrices, each version since the one before, or alone."""
    trace, using = _trace(here, folder, name), coder(who)
    encoding, decoding, left, measured = _Clock(), _Clock(), nbytes, Measured()
    while left > 0:
        for plain, before in _steps(trace):
            for piece in _pieces(trace, plain.itemsize, using, matrices=True):
                base = before[piece] if "delta" in work else None
                measured.stored += _coded(using, plain[piece], base, encoding, decoding)
                left -= plain[piece].nbytes
            if left <= 0:
                break
    return (decoding if "decode" in work else encoding).write(measured, nbytes - left)


def replay(here: Here, *, folder: str, name: str, who: str, saves: int, each: int) -> Measured:
    """The first versions of the matrices, each since the one before, and every ``each``-th by itself."""
    trace, using, clock, measured, whole = _trace(here, folder, name), coder(who), _Clock(), Measured(), 0
    for number, (plain, before) in enumerate(islice(_steps(trace, first=True), saves)):
        for piece in _pieces(trace, plain.itemsize, using, matrices=True):
            base = before[piece] if number % each else None
            measured.stored += _coded(using, plain[piece], base, clock)
            whole += plain[piece].nbytes
    return clock.write(measured, whole)


def follow(here: Here, *, folder: str, name: str, saves: int) -> Measured:
    """The first versions of the matrices, each with the base that `choose_base` names.

    Extra: "kept worst", "kept mean": what the last 8 versions need, in copies, from the middle of ``saves`` on; "load
    worst", "load mean": CPU-seconds for each GB of a verified load; "later": a save behind ``saves``, in copies.
    """
    trace, saving = _trace(here, folder, name), _Clock()
    rows = [_Row(tensor, 2) for tensor in trace.index.tensors if tensor.matrix]
    loads, kept = list[float](), list[int]()
    for number, (_, weights) in enumerate(trace.versions()):
        for row in rows:
            row.save(weights, saving if number < saves else _Clock())
        kept.append(_kept(rows, number))
        if number % _LOADED == _LOADED - 1 and number >= saves // 2:
            loads.append(_load(rows))
    copy, late = sum(row.nbytes for row in rows), kept[saves // 2 :]
    each = [sum(row.versions[number].nbytes for row in rows) for number in range(len(kept))]
    extra: dict[str, float] = {
        "kept worst": max(late) / copy,
        "kept mean": sum(late) / len(late) / copy,
        "load worst": max(loads),
        "load mean": sum(loads) / len(loads),
        "later": sum(each[saves:]) / copy / max(1, len(each) - saves),
        "links": max(row.links() for row in rows),
    }
    measured = Measured(stored=sum(each[:saves]), extra=extra)
    return saving.write(measured, copy * min(saves, len(each)))


def _trace(here: Here, folder: str, name: str) -> Trace:
    from benchmarks.training import trace

    if name not in here.kept:
        here.kept[name] = trace(Path(folder), name)
    found: Trace = here.kept[name]
    return found


class _Clock:
    """Time and processor time of what is done with it."""

    def __init__(self) -> None:
        self.time = self.cpu = 0.0

    def __enter__(self) -> None:
        self.time -= time.perf_counter()
        self.cpu -= time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.cpu += time.thread_time()
        self.time += time.perf_counter()

    def write(self, measured: Measured, plain: int) -> Measured:
        """What it measured; ``plain``: bytes of what was coded."""
        measured.extra["share"] = measured.stored / plain
        measured.blocked = measured.durable = self.time
        measured.cpu, measured.load_average = self.cpu, os.getloadavg()[0]
        return measured


def _pieces(trace: Trace, itemsize: int, using: Coder, *, matrices: bool) -> list[slice]:
    tensors = [one for one in trace.index.tensors if one.matrix or not matrices]
    if not using.by_cell:
        return [slice(one.start, one.stop) for one in tensors]
    return [cell for one in tensors for cell in cut(one, itemsize)]


def _steps(trace: Trace, *, first: bool = False) -> Iterator[tuple[Flat, Flat]]:
    """Each version, and the one before; with ``first``, the first one too."""
    before: Flat | None = None
    for _, weights in trace.versions():
        if before is not None or first:
            yield weights, weights if before is None else before
        before = weights.copy()


def _coded(using: Coder, plain: Flat, base: Flat | None, encoding: _Clock, decoding: _Clock | None = None) -> int:
    """The bytes of what is stored, which was decoded again. Raises WrongBytes."""
    plain = np.ascontiguousarray(plain)
    with encoding:
        stored = using.encode(plain, base)
    mine = None if base is None else base.copy()
    with decoding or _Clock():
        found = using.decode(stored, mine, plain)
    _compare(found, plain)
    return len(stored)


def _compare(found: Flat, wanted: Flat) -> None:
    if view(np.ascontiguousarray(found)) != view(wanted):
        raise WrongBytes("what was decoded is not what was encoded")


def _bound(base: Flat, plain: Flat) -> float:
    """Bytes of changes that are independent of each other: the entropy of which elements changed, and by how much."""
    changed = base != plain
    _, counts = np.unique(plain[changed] - base[changed], return_counts=True)
    return (_entropy(np.array([changed.sum(), (~changed).sum()])) + _entropy(counts)) / 8


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Bits of so many symbols of each kind, together."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


@dataclass(frozen=True)
class _Version:
    """What is stored of one version of a row: a frame for each cell; ``base``: the number of another version."""

    base: int | None
    frames: list[bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.frames))


class _Row:
    """The cells of a tensor, saved version by version as a store does it, and loaded."""

    def __init__(self, tensor: Tensor, itemsize: int) -> None:
        self._place, self._cells = f"{tensor.name} 0", cut(tensor, itemsize)
        self.nbytes = (tensor.stop - tensor.start) * itemsize
        self._last: list[Flat] = []
        self.versions: list[_Version] = []

    def links(self) -> int:
        """The most that a version has."""
        return max(len(self.chain(number)) for number in range(len(self.versions))) - 1

    def chain(self, number: int) -> list[int]:
        """The versions that this one is made of: itself, its base, ..., the key."""
        found, base = [number], self.versions[number].base
        while base is not None:
            found.append(base)
            base = self.versions[base].base
        return found

    def save(self, weights: Flat, clock: _Clock) -> None:
        """One version more."""
        plain = [weights[cell] for cell in self._cells]
        with clock:
            number, bases = self._base()
            version = _Version(number, [_OURS.encode(*pair) for pair in zip(plain, bases, strict=True)])
            if number is not None and not all(map(_is_delta, version.frames)):
                version = _Version(None, [_OURS.encode(one, None) for one in plain])
            self._last = [_OURS.decode(*three) for three in zip(version.frames, bases, plain, strict=True)]
            for pair in zip(self._last, plain, strict=True):
                _compare(*pair)
        self.versions.append(version)

    def _base(self) -> tuple[int | None, Sequence[Flat | None]]:
        """The number and the cells of the base of the next version."""
        chain = self.chain(len(self.versions) - 1) if self.versions else []
        sizes = [self.versions[number].nbytes for number in chain[:-1]]
        left = choose_base(sizes, self.nbytes, self._place) if chain else None
        if left is None:
            return None, [None] * len(self._cells)
        cells = [one.copy() for one in self._last]
        for number in chain[:left]:
            for frame, cell in zip(self.versions[number].frames, cells, strict=True):
                undo(memoryview(frame), view(cell))
        return chain[left], cells

    def load(self, out: list[Flat]) -> None:
        """The newest version, in place, with the digests that a load computes."""
        for number in reversed(self.chain(len(self.versions) - 1)):
            for frame, cell in zip(self.versions[number].frames, out, strict=True):
                _OURS.decode_into(frame, cell)
        for cell in out:
            cell_digest(view(cell))

    def check(self, cells: list[Flat]) -> None:
        """Raise WrongBytes for cells that are not those of the newest version."""
        for pair in zip(cells, self._last, strict=True):
            _compare(*pair)

    def memory(self) -> list[Flat]:
        """Where a version can be loaded to."""
        return [np.zeros_like(one) for one in self._last]


def _is_delta(frame: bytes) -> bool:
    return needs_base(form_of(memoryview(frame)))


def _load(rows: list[_Row]) -> float:
    """CPU-seconds for each GB of a load of the newest version."""
    out, clock = [row.memory() for row in rows], _Clock()
    with clock:
        for row, cells in zip(rows, out, strict=True):
            row.load(cells)
    for row, cells in zip(rows, out, strict=True):
        row.check(cells)
    return clock.cpu / sum(row.nbytes for row in rows) * 1e9


def _kept(rows: list[_Row], newest: int) -> int:
    """Bytes that the last versions need."""
    last = range(max(0, newest + 1 - _KEPT), newest + 1)
    needed = {(row, one) for row in rows for number in last for one in row.chain(number)}
    return sum(row.versions[one].nbytes for row, one in needed)
