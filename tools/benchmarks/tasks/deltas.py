"""States of real training runs, encoded alone and against an earlier version. Everything is decoded and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Clock, Measured
from benchmarks.tasks.coders import Coder, coder, touched, view
from benchmarks.traces import Flat, Trace, cut
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here


def make(here: Here, folder: str, name: str) -> tuple[int, ...]:
    """Create a trace if it does not exist. Return its steps with whole states. Training takes a few minutes."""
    return trace_of(here, folder, name).index.steps


def code(
    here: Here, *, folder: str, name: str, who: str, parts: Sequence[str], step: int, since: int | None, matrices: bool
) -> Measured:
    """Encode the parts of a state. Encode the first part as changes since ``since``.

    Extra: the entropy bound of the changes.
    """
    trace, using, clock = trace_of(here, folder, name), coder(who), Clock()
    measured, whole = Measured(), 0
    for part in parts:
        earlier = since if part == parts[0] else None
        plain, base = trace.part(step, part), None if earlier is None else trace.part(earlier, part)
        pieces = _pieces(trace, plain.itemsize, using, matrices=matrices)
        measured.stored += sum(_coded(using, plain[piece], None if base is None else base[piece], clock)
                               for piece in pieces)  # fmt: skip
        whole += sum(plain[piece].nbytes for piece in pieces)
        if base is not None:
            both = [np.concatenate([one[piece] for piece in pieces]) for one in (base, plain)]
            measured.extra["bound"] = _bound(*both)
    return coded(clock, measured, whole)


def speed(here: Here, *, folder: str, name: str, who: str, work: str, nbytes: int) -> Measured:
    """Encode or decode ``nbytes`` of weight matrices, each version alone or against the previous one."""
    trace, using = trace_of(here, folder, name), coder(who)
    encoding, decoding, left, measured = Clock(), Clock(), nbytes, Measured()
    while left > 0:
        for plain, before in _steps(trace):
            for piece in _pieces(trace, plain.itemsize, using, matrices=True):
                base = before[piece] if "delta" in work else None
                measured.stored += _coded(using, plain[piece], base, encoding, decoding)
                left -= plain[piece].nbytes
            if left <= 0:
                break
    return coded(decoding if "decode" in work else encoding, measured, nbytes - left)


def replay(here: Here, *, folder: str, name: str, who: str, saves: int, each: int) -> Measured:
    """Encode the first versions of the matrices, each against the previous one, except every ``each``-th, alone."""
    trace, using, clock, measured, whole = trace_of(here, folder, name), coder(who), Clock(), Measured(), 0
    for number, (plain, before) in enumerate(islice(_steps(trace, first=True), saves)):
        for piece in _pieces(trace, plain.itemsize, using, matrices=True):
            base = before[piece] if number % each else None
            measured.stored += _coded(using, plain[piece], base, clock)
            whole += plain[piece].nbytes
    return coded(clock, measured, whole)


def trace_of(here: Here, folder: str, name: str) -> Trace:
    """Return a trace. Create it if it does not exist."""
    from benchmarks.training import trace

    if name not in here.kept:
        here.kept[name] = trace(Path(folder), name)
    found: Trace = here.kept[name]
    return found


def coded(clock: Clock, measured: Measured, plain: int) -> Measured:
    """Return the cost, and the stored bytes as a fraction of the ``plain`` bytes."""
    clock.write(measured)
    measured.extra["share"] = measured.stored / plain
    return measured


def _pieces(trace: Trace, itemsize: int, using: Coder, *, matrices: bool) -> list[slice]:
    tensors = [one for one in trace.index.tensors if one.matrix or not matrices]
    if not using.by_cell:
        return [slice(one.start, one.stop) for one in tensors]
    return [cell for one in tensors for cell in cut(one, itemsize)]


def _steps(trace: Trace, *, first: bool = False) -> Iterator[tuple[Flat, Flat]]:
    """Yield each version with the previous one. With ``first``, also yield the first version."""
    before: Flat | None = None
    for _, weights in trace.versions():
        if before is not None or first:
            yield weights, weights if before is None else before
        before = weights.copy()


def _coded(using: Coder, plain: Flat, base: Flat | None, encoding: Clock, decoding: Clock | None = None) -> int:
    """Check the stored bytes by decoding them, and return their number. Raises WrongBytes."""
    with encoding:
        stored = using.encode(plain, base)
    out: Flat = touched(plain) if base is None else base.copy()
    with decoding or Clock():
        using.decode(stored, out, has_base=base is not None)
    compare(out, plain)
    return len(stored)


def compare(found: Flat, wanted: Flat) -> None:
    """Raise WrongBytes if two arrays differ."""
    if view(found) != view(wanted):
        raise WrongBytes("what was decoded is not what was encoded")


def _bound(base: Flat, plain: Flat) -> float:
    """Return the bytes needed for independent changes: the entropy of their positions and of their values."""
    changed = base != plain
    _, counts = np.unique(plain[changed] - base[changed], return_counts=True)
    return (_entropy(np.array([changed.sum(), (~changed).sum()])) + _entropy(counts)) / 8


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the total number of bits for these symbol counts."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())
