"""A reader that follows an RL run step by step and in jumps, compared with complete loads."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import files, values
from benchmarks.measure import Clock, Measured, io_counts
from benchmarks.tasks.deltas import trace_of
from benchmarks.tasks.runs import open_store, shifted
from benchmarks.tasks.storing import Skipped
from benchmarks.traces import CELL
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    import torch

    from benchmarks.traces import Trace
    from benchmarks.worker import Here
    from casckpt.contents.checkpoint import Checkpoint
    from casckpt.store.store import Store

_RUN = "run"
_JUMPS = {"5 forward": (4, 9), "10 back": (12, 2)}


@dataclass
class _Moves:
    """The measurements of a kind of move. ``read``: blob bytes. ``wrote``: the bytes of the preceding save."""

    clocks: list[Clock] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    wrote: list[int] = field(default_factory=list)
    around: list[int] = field(default_factory=list)  # bytes of manifests and records
    kept: list[float] = field(default_factory=list)  # fraction of the state that is kept in frames

    def measured(self) -> Measured:
        """Return the medians. Extra: the worst and the total ratio of bytes read to bytes written."""
        time, cpu = (median(getattr(clock, name) for clock in self.clocks) for name in ("time", "cpu"))
        extra = {"blobs": float(median(self.read)), "around": float(median(self.around))}
        if self.wrote:
            shares = [read / wrote for read, wrote in zip(self.read, self.wrote, strict=True)]
            extra |= {
                "worst/delta": max(shares),
                "all/deltas": sum(self.read) / sum(self.wrote),
                "kept": max(self.kept),
            }
        return Measured(time, time, cpu, extra=extra)


def follow(here: Here, *, folder: str, name: str, place: str, nbytes: int, steps: int, rate: float) -> Measured:
    """Save each version.

    After each save, a reader updates by one step and loads everything. Returns the updates; `found` returns the rest.
    ``rate``: bytes per second, or 0 for a folder, for which only the total number of bytes read is known.
    """
    path = Path(place)
    try:
        moves = _Follower(path, rate).follow(trace_of(here, folder, name), nbytes, steps)
        here.kept["updates"] = {what: one.measured() for what, one in moves.items()}
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
    return found(here, what="by one step")


def found(here: Here, *, what: str) -> Measured:
    """Return another result of the last `follow`."""
    if what not in here.kept["updates"]:
        raise Skipped("there are too few versions")
    measured: Measured = here.kept["updates"][what]
    return measured


class _Follower:
    def __init__(self, path: Path, rate: float) -> None:
        self._writer, self._path = open_store(path, rate), path
        self._reader = open_store(path, rate)
        self._moves: dict[str, _Moves] = {}

    def follow(self, trace: Trace, nbytes: int, steps: int) -> dict[str, _Moves]:
        """Perform all moves, and return them by name. Each must result in the correct bytes."""
        versions = itertools.islice(shifted(trace, nbytes), steps)
        state = next(versions)
        mine, other = values.poisoned(state), values.poisoned(state)
        self._writer.save(state, run=_RUN, step=0, compress="auto")
        held = self._reader.load(mine, f"{_RUN}@0")
        before = _first(state)
        for step, state in enumerate(versions, start=1):
            saved = self._writer.save(state, run=_RUN, step=step, compress="auto")
            held = self._move("by one step", mine, step, held, saved.stats.bytes_written)
            self._load(other, step)
            _check(state, mine, other)
            if step == steps - 1:
                self._moves["hash and decode"] = _least(before, _first(state), len(state))
            before = _first(state)
        for what, (start, end) in _JUMPS.items():
            if max(start, end) < steps:
                self._jump(what, mine, start, end)
        return self._moves

    def _move(
        self, what: str, mine: dict[str, torch.Tensor], step: int, held: Checkpoint, wrote: int | None = None
    ) -> Checkpoint:
        with self._noted(what) as moves:
            held = self._reader.update(mine, f"{_RUN}@{step}", held=held)
        if wrote is not None:
            moves.wrote.append(wrote)
        kept = sum(len(data) for frames in held.frames.values() for data in frames.values())
        moves.kept.append(kept / values.size_of(mine))
        return held

    def _load(self, into: dict[str, torch.Tensor], step: int) -> None:
        files.drop_from_cache(self._path, everything=False)
        with self._noted("a load of all"):
            self._reader.load(into, f"{_RUN}@{step}")

    def _jump(self, what: str, mine: dict[str, torch.Tensor], start: int, end: int) -> None:
        held = self._reader.load(mine, f"{_RUN}@{start}")
        self._move(what, mine, end, held)
        other = values.poisoned(mine)
        self._reader.load(other, f"{_RUN}@{end}")
        _check(other, mine)

    @contextmanager
    def _noted(self, what: str) -> Iterator[_Moves]:
        moves, clock = self._moves.setdefault(what, _Moves()), Clock()
        before = _counts(self._reader)
        with clock:
            yield moves
        read, around = (now - then for now, then in zip(_counts(self._reader), before, strict=True))
        moves.clocks.append(clock)
        moves.read.append(read)
        moves.around.append(around)


def _counts(store: Store) -> tuple[int, int]:
    """Count the bytes read from blobs, and other bytes. A folder does not distinguish them."""
    storage: Any = store.repository.storage
    counts = io_counts(storage.inner if hasattr(storage, "read") else storage)
    blobs = getattr(storage, "read", counts.bytes_read)
    return blobs, counts.bytes_read - blobs


def _first(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a copy of the first tensor."""
    return next(iter(state.values())).clone()


def _check(wanted: dict[str, torch.Tensor], *found: dict[str, torch.Tensor]) -> None:
    for one in found:
        if values.differing(wanted, one):
            raise WrongBytes("casckpt: an update does not end with the bytes that a load returns")


def _least(before: torch.Tensor, after: torch.Tensor, copies: int) -> _Moves:
    """Measure only the cost of hashing and decoding on one copy, and scale it."""
    from casckpt.format.digest import cell_digest
    from casckpt.format.encodings.frames import decode, encode_delta, encode_planes

    old, new = (values.as_bytes(one).numpy() for one in (before, after))
    places = [slice(start, start + CELL) for start in range(0, len(new), CELL)]
    cells = ((new[at].data, old[at].data, old[at].copy().data) for at in places)
    coded = [(encode_delta(cell, 2, held) or encode_planes(cell, 2), base) for cell, held, base in cells]
    with (clock := Clock()):
        for frame, base in coded:
            if frame is not None:
                decode(memoryview(frame), base, base)
            cell_digest(base)
    clock.time, clock.cpu = clock.time * copies, clock.cpu * copies
    return _Moves([clock], [0], [], [0])
