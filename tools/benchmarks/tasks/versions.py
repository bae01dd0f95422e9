"""Versions of a trace, encoded against the bases that casckpt chooses, as in a store, but without a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.measure import Clock, Measured
from benchmarks.tasks.coders import Ours, touched, view
from benchmarks.tasks.deltas import coded, compare, trace_of
from benchmarks.traces import Flat, Tensor, cut
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import Form, needs_base, undo
from casckpt.plan.routes import choose_base

if TYPE_CHECKING:
    from benchmarks.worker import Here

_KEPT = 8  # the number of versions that the gc policy keeps, for the counts
_LOADED = 4  # one of this many versions is loaded
_OURS = Ours()


def follow(here: Here, *, folder: str, name: str, saves: int) -> Measured:
    """Encode the first versions of the matrices, each against the base that `choose_base` returns.

    Extra: "kept worst", "kept mean": the size of the last 8 versions, in full copies, from the middle of ``saves`` on;
    "load worst", "load mean": CPU-seconds per GB of a verified load; "later": the size of a save after ``saves``, in
    full copies.
    """
    trace, saving = trace_of(here, folder, name), Clock()
    rows = [_Row(tensor, 2) for tensor in trace.index.tensors if tensor.matrix]
    loads, kept = list[float](), list[int]()
    for number, (_, weights) in enumerate(trace.versions()):
        for row in rows:
            row.save(weights, saving if number < saves else Clock())
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
    return coded(saving, measured, copy * min(saves, len(each)))


@dataclass(frozen=True)
class _Version:
    """The stored form of a version of a row: a frame for each cell. ``base``: the number of the base version."""

    base: int | None
    frames: list[bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.frames))


class _Row:
    """The cells of a tensor, which are saved version by version as in a store, and loaded."""

    def __init__(self, tensor: Tensor, itemsize: int) -> None:
        self._place, self._cells = f"{tensor.name} 0", cut(tensor, itemsize)
        self.nbytes = (tensor.stop - tensor.start) * itemsize
        self._last: list[Flat] = []
        self.versions: list[_Version] = []

    def links(self) -> int:
        """Return the length of the longest chain of any version."""
        return max(len(self.chain(number)) for number in range(len(self.versions))) - 1

    def chain(self, number: int) -> list[int]:
        """Return the versions that reading this one decodes: itself, its base, and so on to the full cell."""
        found, base = [number], self.versions[number].base
        while base is not None:
            found.append(base)
            base = self.versions[base].base
        return found

    def save(self, weights: Flat, clock: Clock) -> None:
        """Encode a new version, decode it, and compare it."""
        plain = [weights[cell] for cell in self._cells]
        self._last = self._last or [touched(one) for one in plain]
        with clock:
            base = self._step_back() if self.versions else None
            frames = [_OURS.encode(*pair) for pair in zip(plain, self._last, strict=True)] if base is not None else []
            if not frames or not all(map(_is_delta, frames, plain)):
                base, frames = None, [_OURS.encode(one, None) for one in plain]
            self.versions.append(_Version(base, frames))
            for frame, cell, one in zip(frames, self._last, plain, strict=True):
                _OURS.decode(frame, cell, has_base=base is not None)
                compare(cell, one)

    def _step_back(self) -> int | None:
        """Restore the base of the next version from the last one. Return its number, or None for a full cell."""
        chain = self.chain(len(self.versions) - 1)
        left = choose_base([self.versions[number].nbytes for number in chain[:-1]], self.nbytes, self._place)
        for number in chain[: left or 0]:
            for frame, cell in zip(self.versions[number].frames, self._last, strict=True):
                undo(memoryview(frame), view(cell))
        return None if left is None else chain[left]

    def load(self, out: list[Flat]) -> None:
        """Load and verify the newest version in place."""
        for number in reversed(self.chain(len(self.versions) - 1)):
            for frame, cell in zip(self.versions[number].frames, out, strict=True):
                _OURS.decode(frame, cell, has_base=True)
        for cell in out:
            cell_digest(view(cell))

    def check(self, cells: list[Flat]) -> None:
        """Raise WrongBytes for cells that differ from the newest version."""
        for pair in zip(cells, self._last, strict=True):
            compare(*pair)

    def memory(self) -> list[Flat]:
        """Return memory for a load."""
        return [touched(one) for one in self._last]


def _is_delta(frame: bytes, plain: Flat) -> bool:
    return len(frame) < plain.nbytes and needs_base(Form(frame[0]))


def _load(rows: list[_Row]) -> float:
    """Measure the CPU-seconds per GB when the newest version is loaded."""
    out, clock = [row.memory() for row in rows], Clock()
    with clock:
        for row, cells in zip(rows, out, strict=True):
            row.load(cells)
    for row, cells in zip(rows, out, strict=True):
        row.check(cells)
    return clock.cpu / sum(row.nbytes for row in rows) * 1e9


def _kept(rows: list[_Row], newest: int) -> int:
    """Return the bytes of the last versions and their bases."""
    last = range(max(0, newest + 1 - _KEPT), newest + 1)
    needed = {(row, one) for row in rows for number in last for one in row.chain(number)}
    return sum(row.versions[one].nbytes for row, one in needed)
