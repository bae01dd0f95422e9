"""Compares replicas: samples before a rank writes, and some cells afterwards.

Every rank sends one digest for each set of ranks with which it shares rows. Ranks send more only if these digests
differ, or if a layout is new. See docs/decisions/0064-replicas-are-split-and-compared-by-samples.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import randbelow
from typing import Final, TypeAlias

import numpy as np
import torch

from casckpt.errors import InvalidInput
from casckpt.format.digest import Hasher, cell_digest
from casckpt.format.extents import ExtentTable
from casckpt.format.sections.columns import Ints
from casckpt.format.sections.index import PART
from casckpt.plan.writers import RUNS, Holders, Words, WriteRanges, places, row_digests, to_read_again
from casckpt.saving.layout import RankLayout, WritePlan, layout_of, region_hash
from casckpt.saving.local_entries import LocalEntry
from casckpt.saving.prepare import Prepared, tensors_of
from casckpt.saving.shares import Share
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.gpu import wait_for_gpus
from casckpt.tensors.memory import RUN, TensorMemory, sampled

REFUSED: Final = 0.1
"""The smallest relative difference at which a save refuses a parameter, if the process has not saved this parameter
before."""
_DIGEST_BYTES: Final = 1 << 20
_ADVICE: Final = (
    "Use a different name on each rank for values that belong to one rank. In Store.save, wrap such a value in "
    "casckpt.PerRank, or name the rank that maintains it with owners=. With check_replicas='off', casckpt saves one "
    "rank's value, and all ranks load it"
)


@dataclass(frozen=True)
class Samples:
    """The layout of a rank, with the sampled words of each row, or with a single digest of them."""

    layout: RankLayout
    words: Words


@dataclass
class ReplicaMemory:
    """The data that rank 0 keeps about all saves of one process group into one store.

    ``saved``: the keys of tensors in committed saves. ``differing``: the keys whose values differed across ranks in a
    committed save. One rank writes these values in full. ``found``: further differing keys, which a front end found
    before a save.
    """

    found: dict[str, None] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    differing: dict[str, None] = field(default_factory=dict)


_memories: Final[dict[tuple[str, str], ReplicaMemory]] = {}


def memory_of(url: str, group: str) -> ReplicaMemory:
    """Return this process's memory for a store and a process group."""
    return _memories.setdefault((url, group), ReplicaMemory())


@dataclass
class Compared:
    """The rows of the last plan that this rank compares with other ranks.

    ``sets``: the rows that this rank shares with each set of ranks. ``turn``: the number of committed saves plus a
    random number, so that a job that restarts often does not always read the same cells.
    """

    sets: Sequence[tuple[int, Ints]] = ()
    turn: int = field(default_factory=lambda: randbelow(1 << 32))

    def plan(self, sets: Words) -> None:
        """Set the rows to compare.

        ``sets``: for each row, the number of the set of ranks that hold it, or 0 if the row is not compared.
        """
        self.sets = [(number, np.flatnonzero(sets == number)) for number in np.unique(sets[sets > 0]).tolist()]

    def set_digests(self, prepared: Prepared, layout: RankLayout, seed: int, runs: int) -> dict[int, bytes]:
        """Return one digest of the samples for each set of rows."""
        if not self.sets:
            return {}
        rows = np.concatenate([rows for _, rows in self.sets])
        ends = np.cumsum([len(rows) for _, rows in self.sets])[:-1]
        digests = np.split(row_digests(self.samples(prepared, layout, seed, runs, rows)), ends)
        return {number: cell_digest(of_set.tobytes()) for (number, _), of_set in zip(self.sets, digests, strict=True)}

    def samples(self, prepared: Prepared, layout: RankLayout, seed: int, runs: int, rows: Ints | None = None) -> Words:
        """Take ``runs`` runs of each tensor in ``rows``, and a digest of each object except pickles.

        If ``rows`` is None, take all rows. Pickles are excluded because equal objects may have different pickles. If
        ``runs`` is 0, digest all bytes of each row, including pickles.
        """
        held, tensors = layout.held, tensors_of(prepared)
        wait_for_gpus(tensors)
        rows = np.arange(len(held)) if rows is None else rows
        words = np.zeros((len(rows), 2 * runs or 1), np.uint64)
        is_tensor = rows < len(tensors)
        tensor_rows = rows[is_tensor]
        data = [tensors[row] for row in tensor_rows.tolist()]
        if runs:
            count, size = held.hi[tensor_rows] - held.lo[tensor_rows], held.itemsize[tensor_rows]
            last = np.maximum(count - RUN // size, 0)
            starts = places(held.name[tensor_rows] ^ held.region[tensor_rows], seed, last + 1, runs)
            in_full = np.minimum(np.arange(runs) * (RUN // size)[:, None], last[:, None])
            starts = np.where((count * size <= runs * RUN)[:, None], in_full, starts)
            words[is_tensor] = sampled(data, starts, count, size)
        else:
            words[is_tensor, 0] = _words([digest_of(tensor) for tensor in data])
        if len(tensor_rows) < len(rows):
            words[~is_tensor, 0] = _object_digests(prepared, pickles=not runs)[rows[~is_tensor] - len(tensors)]
        return words

    def read_again(self, prepared: Prepared, layout: RankLayout, ranges: WriteRanges) -> tuple[int, Words]:
        """Read some cells that other ranks write. Return the turn of this save, and the digests of the cells."""
        tensors, digests = tensors_of(prepared), []
        for row, lo, hi in to_read_again(layout.held, ranges, self.turn):
            start = int(layout.held.lo[row])
            digests.append(digest_of(tensors[row], lo - start, hi - start))
        return self.turn, _words(digests)


def runs_of(check: str) -> int:
    """Return the number of runs that a save compares in each row. 0 means all bytes."""
    return 0 if check == "raise" else RUNS


def seed_of(run: str, step: int) -> int:
    """Return a number that is the same on all ranks of a save, but differs from save to save."""
    return int.from_bytes(cell_digest(f"{run}@{step}".encode())[:8], "little")


def _object_digests(prepared: Prepared, *, pickles: bool) -> Words:
    """Digest each object together with its large buffers. If ``pickles`` is False, the digest of a pickle is 0."""
    parts: dict[tuple[str, int | None], list[bytes]] = {}
    for source in prepared.sources:
        if source.kind == PART and isinstance(source.data, bytes):
            parts.setdefault((source.key, source.rank), []).append(cell_digest(source.data))
    contents = [b"".join([one.data, *parts.get((one.key, one.rank), [])]) for one in prepared.objects]
    found = _words([cell_digest(content) for content in contents])
    return np.where([one.pickled and not pickles for one in prepared.objects], np.uint64(0), found)


def digest_of(data: torch.Tensor, lo: int = 0, hi: int | None = None) -> bytes:
    """Return the digest of the elements [lo, hi) of a tensor, in row-major order. The default is all elements."""
    memory, hi = TensorMemory(data), data.numel() if hi is None else hi
    view = memory.view(lo, hi)
    if view is not None:
        return cell_digest(view)
    hasher, step = Hasher(), _DIGEST_BYTES // memory.itemsize
    for at in range(lo, hi, step):
        buffer = memoryview(bytearray((min(at + step, hi) - at) * memory.itemsize))
        memory.copy_out(at, min(at + step, hi), buffer)
        hasher.update(buffer)
    return hasher.digest()


def _words(digests: Sequence[bytes]) -> Words:
    """Shorten each digest to a word. Ranks only compare these words. They never store them."""
    return np.frombuffer(b"".join([digest[:8] for digest in digests]), np.uint64)


# rank 0


Odd: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""Rows that differ; see `casckpt.plan.writers.Holders.differing`."""


def find_odd(samples: Sequence[Samples], memory: ReplicaMemory, check: str) -> Odd:
    """Find the rows whose samples differ across ranks. Skip keys that are already known to differ.

    If ``check`` is "raise", raises InvalidInput for any differing row, known or not.
    """
    layouts = [one.layout for one in samples]
    odd = Holders([one.held for one in layouts]).differing([row_digests(one.words) for one in samples])
    if odd and check == "raise":
        (first, row), *others = odd[0]
        other = next(rank for rank, at in others if (samples[rank].words[at] != samples[first].words[row]).any())
        advice = (
            "Synchronize it before the save, or name the rank that maintains it with owners=, or pass "
            "check_replicas='sample', which allows small differences"
        )
        raise _differs(layouts[first].key(row), first, other, "", advice)
    return [rows for rows in odd if layouts[rows[0][0]].key(rows[0][1]) not in memory.differing]


def judged(
    layouts: Sequence[RankLayout], odd: Odd, words: Sequence[Mapping[int, Words] | Words], memory: ReplicaMemory
) -> dict[str, None]:
    """Return the keys of the ``odd`` rows. For each of these keys, a save may store one rank's value.

    ``words``: for each rank, the samples of its odd rows, by row. Raises InvalidInput for a parameter that differs too
    much when it is saved for the first time.
    """
    keys: dict[str, None] = {}
    for (first, row), *others in odd:
        layout = layouts[first]
        (_, key, _, _), dtype, _ = layout.stream(row)
        nbytes = int((layout.held.hi[row] - layout.held.lo[row]) * layout.held.itemsize[row])
        expected = _values(words[first][row], nbytes)
        ratios = {rank: relative_difference(dtype, expected, _values(words[rank][at], nbytes)) for rank, at in others}
        other = max(ratios, key=lambda rank: ratios[rank])
        if ratios[other] >= REFUSED and not layout.may_differ[row] and key not in memory.saved:
            raise _differs(key, first, other, f" (relative difference {ratios[other]:.3g})", _ADVICE)
        keys[key] = None
    return keys


def _differs(key: str, one: int, other: int, how: str, advice: str) -> InvalidInput:
    text = f"{key!r} differs between ranks {one} and {other}, which should hold the same value{how}; nothing was saved"
    return InvalidInput(f"{text}. {advice}", key=key, rank=other)


def _values(words: Words, nbytes: int) -> bytes:
    """Return the sampled bytes of a row that has ``nbytes`` bytes. For a small row, return each byte once."""
    data, rest = words.tobytes(), nbytes % RUN
    if not rest or nbytes < RUN or nbytes >= len(data):
        return data[:nbytes]
    last = nbytes - rest
    return data[:last] + data[last + RUN - rest : last + RUN]


def relative_difference(dtype: str, one: bytes, other: bytes) -> float:
    """Return ``|a - b| / max(|a|, |b|)`` for two value lists, in float64. Return 1 if a non-finite value differs."""
    kind = torch_dtype(dtype) if dtype else torch.uint8
    if not (kind.is_floating_point or kind.is_complex) or dtype.startswith("float4"):
        return float(one != other)
    a, b = (torch.frombuffer(bytearray(data), dtype=kind) for data in (one, other))
    a, b = ((torch.view_as_real(x).reshape(-1) if kind.is_complex else x).to(torch.float64) for x in (a, b))
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not (a[differs].isfinite().all() and b[differs].isfinite().all()):
        return 1.0
    a, b = a.where(a.isfinite(), 0), b.where(b.isfinite(), 0)
    largest = max(a.abs().max().item(), b.abs().max().item()) or 1.0
    norms = [float((x / largest).norm()) for x in (a - b, a, b)]
    return norms[0] / (max(norms[1:]) or 1.0)


def differing_cells(plan: WritePlan, described: Share, again: Sequence[tuple[int, Words] | None]) -> dict[str, None]:
    """Return the keys of all cells whose value on some rank differs from the written value.

    ``again``: the results of `Compared.read_again`, by rank.
    """
    keys: dict[str, None] = {}
    for rank, read in enumerate(again):
        turn, digests = read or (0, ())
        held = plan.layouts[rank].held
        cells = to_read_again(held, plan.ranges[rank], turn)
        for digest, (row, lo, hi) in zip(digests, cells, strict=False):
            name = plan.layouts[rank].stream(row)[0]
            region = int(held.region[row]), int(held.lo[row]), int(held.hi[row])
            written = _written(described.extents[name][1], region, lo, hi)
            if written is not None and _words([written])[0] != digest:
                keys[name[1]] = None
    return keys


def _written(table: ExtentTable, region: tuple[int, int, int], lo: int, hi: int) -> bytes | None:
    """Return the digest of the written cell, or None if the manifest has no such cell."""
    boxes = [number for number, box in enumerate(table.boxes) if region_hash(box, *region[1:]) == region[0]]
    cells = [cell for box in boxes for cell in table.cells_in(box, lo, hi)]
    return cells[0].digest if [(cell.lo, cell.hi) for cell in cells] == [(lo, hi)] else None


# for front ends that choose the writer of each replica themselves


def compare(gathered: Iterable[Samples | None], size: int, memory: ReplicaMemory, check: str) -> None:
    """Compare the samples of all ``size`` ranks, if all of them have some, and remember the differences.

    Raises the errors of `find_odd` and `judged`.
    """
    samples = [of_rank for of_rank in gathered if of_rank is not None]
    if len(samples) == size:
        odd = find_odd(samples, memory, check)
        memory.found |= judged([one.layout for one in samples], odd, [one.words for one in samples], memory)


def samples_of(sources: Sequence[LocalEntry], run: str, step: int, check: str) -> Samples:
    """Sample tensors that other ranks may also hold, for a save with this ``check``."""
    prepared = Prepared(sources, [], [], b"")
    layout = layout_of(prepared, RUN)
    return Samples(layout, Compared().samples(prepared, layout, seed_of(run, step), runs_of(check)))
