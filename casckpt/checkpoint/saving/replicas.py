"""What several ranks hold whole: samples of it are compared before any rank writes, and parts of it again after that.

Every rank hands up one digest for each set of ranks that it shares rows with. Only where these differ do the ranks
name rows, and values of them. See docs/decisions/0064-replicas-are-compared-by-samples.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Final

import numpy as np
import torch

from casckpt.checkpoint.saving.layout import RankLayout, WritePlan, layout_of, region_hash
from casckpt.checkpoint.saving.prepare import Prepared, tensors_of
from casckpt.checkpoint.saving.shares import Share, Streams
from casckpt.checkpoint.saving.sources import Source
from casckpt.errors import InvalidInput
from casckpt.format.columns import Ints
from casckpt.format.digest import cell_digest
from casckpt.format.extents import ExtentTable
from casckpt.format.sections.index import PART
from casckpt.plan.replicas import RUNS, Holders, Words, places, row_digests, to_read_again
from casckpt.plan.writers import WriteRanges
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.gpu import wait_for_gpus
from casckpt.tensors.memory import TensorMemory
from casckpt.tensors.sampling import RUN, sampled

REFUSED: Final = 0.1
"""From this relative difference on, two values of a parameter are two parameters."""
_VALUES: Final = 64  # of a row, where samples differ
_SHORT: Final = 8  # bytes of the digest of a cell, which is compared and never stored


@dataclass
class ReplicaMemory:
    """What rank 0 keeps of all saves of a process group into one store, however often either is opened anew.

    ``saved``: keys of tensors that were committed, up to those of ``streams``. ``differing``: keys of what ranks did
    not hold alike in a save that was committed: one rank writes these whole. ``found``: others, which a front end found
    before the save that is to say so.
    """

    streams: Streams | None = None
    found: dict[str, None] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    differing: dict[str, None] = field(default_factory=dict)


_memories: Final[dict[tuple[str, str], ReplicaMemory]] = {}


def memory_of(url: str, group: str) -> ReplicaMemory:
    """What this process keeps of its saves into a store by a process group."""
    return _memories.setdefault((url, group), ReplicaMemory())


@dataclass
class Compared:
    """What a rank keeps of its last plan to compare by, and what that has cost so far.

    ``sets``: the rows that it shares with each set of ranks. ``shared``: see `casckpt.plan.replicas.Holders.shared`.
    ``turn``: counts the saves that were committed. ``seconds``: of a processor, that comparing took; ``tensors``: how
    many were sampled.
    """

    sets: Sequence[tuple[int, Ints]] = ()
    shared: Ints | None = None
    turn: int | None = None
    seconds: float = 0.0
    tensors: int = 0

    def plan(self, sets: Words, shared: Ints) -> None:
        """Compare by these from now on."""
        self.sets = [(number, np.flatnonzero(sets == number)) for number in np.unique(sets[sets > 0]).tolist()]
        self.shared = shared

    def set_digests(self, prepared: Prepared, layout: RankLayout, seed: int) -> dict[int, bytes]:
        """A digest of the samples of all rows of each set."""
        if not self.sets:
            return {}
        rows = np.concatenate([rows for _, rows in self.sets])
        ends = np.cumsum([len(rows) for _, rows in self.sets])[:-1]
        digests = np.split(self.row_digests(prepared, layout, seed, rows), ends)
        return {number: cell_digest(mine.tobytes()) for (number, _), mine in zip(self.sets, digests, strict=True)}

    def row_digests(self, prepared: Prepared, layout: RankLayout, seed: int, rows: Ints | None = None) -> Words:
        """A digest of a sample of each of these rows (None: of all): of tensors a few runs, of objects all.

        Not of pickles: equal objects may have different ones.
        """
        begun = thread_time()
        tensors = tensors_of(prepared)
        wait_for_gpus(tensors)
        rows = np.arange(len(layout.held)) if rows is None else rows
        found = np.zeros(len(rows), np.uint64)
        is_tensor = rows < len(tensors)
        mine = rows[is_tensor]
        found[is_tensor] = row_digests(_sampled(tensors, layout, mine, seed))
        if len(mine) < len(rows):
            objects = object_digests(prepared)
            pickled = [one.pickled for one in prepared.objects]
            numbers = (rows[~is_tensor] - len(tensors)).tolist()
            short = [bytes(_SHORT) if pickled[number] else objects[number][:_SHORT] for number in numbers]
            found[~is_tensor] = np.frombuffer(b"".join(short), np.uint64)
        self.seconds += thread_time() - begun
        self.tensors += len(mine)
        return found

    def read_again(
        self, prepared: Prepared, layout: RankLayout, duty: WriteRanges, seed: int
    ) -> tuple[int, bytes] | None:
        """The number of this save, and short digests of the cells of others that this rank reads in it."""
        if self.shared is None:
            return None
        if self.turn is None:  # a job that is stopped after few saves is not to read the same ones each time
            self.turn = seed >> 32
        begun, turn, found = thread_time(), self.turn, []
        tensors = tensors_of(prepared)
        for row, lo, hi in to_read_again(layout.held, duty, self.shared, turn):
            memory, start = TensorMemory(tensors[row]), int(layout.held.lo[row])
            found.append(_digest(memory, lo - start, hi - start)[:_SHORT])
        self.seconds += thread_time() - begun
        return turn, b"".join(found)


def seed_of(run: str, step: int) -> int:
    """A number that all ranks of a save have in common, and that differs by save."""
    return int.from_bytes(cell_digest(f"{run}@{step}".encode())[:8], "little")


def _sampled(tensors: Sequence[torch.Tensor], layout: RankLayout, rows: Ints, seed: int) -> Words:
    return sampled([tensors[row] for row in rows.tolist()], *_runs(layout, rows, seed))


def _runs(layout: RankLayout, rows: Ints, seed: int) -> tuple[Ints, Ints]:
    """(byte at which each run of each row begins, bytes of each row)."""
    held = layout.held
    size, count = held.itemsize[rows], held.hi[rows] - held.lo[rows]
    nbytes = count * size
    starts = places(held.name[rows] ^ held.region[rows], seed, count - RUN // size + 1, RUNS) * size[:, None]
    all_of_it = np.maximum(np.minimum(np.arange(RUNS) * RUN, nbytes[:, None] - RUN), 0)
    return np.where(nbytes[:, None] <= RUNS * RUN, all_of_it, starts), nbytes


def values_of(prepared: Prepared, layout: RankLayout, row: int, seed: int) -> bytes:
    """`_VALUES` elements of a tensor, those of its sample among them, or all; of an object its digest."""
    tensors = tensors_of(prepared)
    if row >= len(tensors):
        return object_digests(prepared)[row - len(tensors)]
    memory, held = TensorMemory(tensors[row]), layout.held
    count, size = int(held.hi[row] - held.lo[row]), memory.itemsize
    run = RUN // size
    name = held.name[row : row + 1] ^ held.region[row : row + 1]
    starts = places(name, seed, np.array([count - run + 1]), _VALUES // run)[0].tolist()
    pieces = [(0, count)] if count <= _VALUES else [(at, at + run) for at in starts]
    return b"".join(_bytes(memory, lo, hi) for lo, hi in pieces)


def _bytes(memory: TensorMemory, lo: int, hi: int) -> bytes:
    found = bytearray((hi - lo) * memory.itemsize)
    memory.copy_out(lo, hi, memoryview(found))
    return bytes(found)


def _digest(memory: TensorMemory, lo: int, hi: int) -> bytes:
    view = memory.view(lo, hi)
    return cell_digest(_bytes(memory, lo, hi) if view is None else view)


def object_digests(prepared: Prepared) -> list[bytes]:
    """A digest of each object with its large buffers."""
    parts: dict[tuple[str, int | None], list[bytes]] = {}
    for source in prepared.sources:
        if source.kind == PART and source.buffer is not None:
            parts.setdefault((source.key, source.rank), []).append(cell_digest(source.buffer))
    return [cell_digest(b"".join([one.data, *parts.get((one.key, one.rank), [])])) for one in prepared.objects]


# rank 0


@dataclass(frozen=True)
class Difference:
    """Two ranks, of those that hold ``key``, whose values differ by ``ratio`` of their norm.

    ``may_differ``: see `casckpt.tensors.shards.may_differ`.
    """

    key: str
    ranks: tuple[int, int]
    ratio: float
    may_differ: bool

    def check(self, memory: ReplicaMemory, check: str, advice: str = "") -> None:
        """Raise InvalidInput, with more ``advice``, for what is not to be saved."""
        first = self.ratio >= REFUSED and not self.may_differ and self.key not in memory.saved
        if check != "raise" and not first:
            return
        one, other = self.ranks
        raise InvalidInput(
            f"{self.key!r} differs between ranks {one} and {other}, which should hold the same (relative difference "
            f"{self.ratio:.3g}); nothing was saved. Give what each rank has for itself a name of its own{advice}; or "
            "pass check_replicas='off', and the value of one rank is saved",
            key=self.key,
            rank=other,
        )


def differences(
    layouts: Sequence[RankLayout], rows: Sequence[Sequence[tuple[int, int]]], values: Sequence[Mapping[int, bytes]]
) -> Iterator[Difference]:
    """How far the two farthest ranks of each of ``rows`` differ; see `casckpt.plan.replicas.Holders.differing`."""
    for holders in rows:
        (first, row), *others = holders
        (_, key, _, _), dtype, _ = layouts[first].stream(row)
        ratios = {rank: relative_difference(dtype, values[first][row], values[rank][at]) for rank, at in others}
        farthest = max(ratios, key=lambda rank: ratios[rank])
        yield Difference(key, (first, farthest), ratios[farthest], bool(layouts[first].may_differ[row]))


def relative_difference(dtype: str, one: bytes, other: bytes) -> float:
    """``|a - b| / max(|a|, |b|)`` of two lists of values, in float64. 1 for what differs and is no finite number."""
    if one == other:
        return 0.0
    kind = torch_dtype(dtype) if dtype else torch.uint8
    if not (kind.is_floating_point or kind.is_complex) or dtype.startswith("float4"):
        return 1.0
    a, b = (_numbers(data, kind) for data in (one, other))
    bits = (torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, kind.itemsize) for data in (one, other))
    differs = torch.ne(*bits).any(dim=1).repeat_interleave(a.numel() * kind.itemsize // len(one))
    if not (a[differs].isfinite().all() and b[differs].isfinite().all()):
        return 1.0
    a, b = a.where(a.isfinite(), 0), b.where(b.isfinite(), 0)
    largest = max(a.abs().max().item(), b.abs().max().item())
    if not largest:
        return 0.0
    return float(((a - b) / largest).norm() / max((a / largest).norm(), (b / largest).norm()))


def _numbers(data: bytes, kind: torch.dtype) -> torch.Tensor:
    found = torch.frombuffer(bytearray(data), dtype=kind)
    return (torch.view_as_real(found).reshape(-1) if kind.is_complex else found).to(torch.float64)


def differing_cells(plan: WritePlan, described: Share, told: Sequence[tuple[int, bytes] | None]) -> dict[str, None]:
    """The keys of cells that other ranks hold otherwise than they were written. ``told``: of `Compared.read_again`."""
    found: dict[str, None] = {}
    for rank, again in enumerate(told):
        if again is None:
            continue
        (turn, digests), layout = again, plan.layouts[rank]
        cells = to_read_again(layout.held, plan.duties[rank], plan.shared[rank], turn)
        for number, (row, lo, hi) in enumerate(cells):
            name = layout.stream(row)[0]
            written = _written(described.extents[name][1], layout, row, lo, hi)
            if written is not None and written[:_SHORT] != digests[number * _SHORT : (number + 1) * _SHORT]:
                found[name[1]] = None
    return found


def _written(table: ExtentTable, layout: RankLayout, row: int, lo: int, hi: int) -> bytes | None:
    """The digest with which a cell was written; None if that was cut elsewhere, along an older checkpoint."""
    held = layout.held
    for number, box in enumerate(table.boxes):
        if region_hash(box, int(held.lo[row]), int(held.hi[row])) == int(held.region[row]):
            cells = list(table.cells_in(number, lo, hi))
            return cells[0].digest if len(cells) == 1 and (cells[0].lo, cells[0].hi) == (lo, hi) else None
    return None


# for front ends by whose rules one rank writes what several hold


@dataclass(frozen=True)
class Samples:
    """Samples of what a rank holds."""

    layout: RankLayout
    words: Words


def samples_of(sources: Sequence[Source], run: str, step: int) -> Samples:
    """Look at tensors that other ranks may hold, too."""
    prepared = Prepared(sources, [], [], b"")
    tensors = tensors_of(prepared)
    wait_for_gpus(tensors)
    layout = layout_of(prepared, RUN)
    return Samples(layout, _sampled(tensors, layout, np.arange(len(tensors)), seed_of(run, step)))


def check_samples(samples: Sequence[Samples], memory: ReplicaMemory, check: str) -> None:
    """Compare them, on rank 0. What differs is noted in ``memory.found``. Raises InvalidInput as a save does."""
    layouts = [one.layout for one in samples]
    rows = Holders([layout.held for layout in layouts]).differing([row_digests(one.words) for one in samples])
    values: list[dict[int, bytes]] = [{} for _ in samples]
    for rank, row in (holder for holders in rows for holder in holders):
        values[rank][row] = samples[rank].words[row].tobytes()
    for one in differences(layouts, rows, values):
        one.check(memory, check)
        memory.found[one.key] = None
