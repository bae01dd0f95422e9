"""What several ranks hold whole: samples of it are compared before any rank writes, and parts of it again after that.

Every rank hands up one digest for each set of ranks that it shares rows with. Only where these differ, or layouts are
new, do the ranks send the samples. See docs/decisions/0064-replicas-are-compared-by-samples.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Final, TypeAlias

import numpy as np
import torch

from casckpt.checkpoint.saving.layout import RankLayout, WritePlan, layout_of, region_hash
from casckpt.checkpoint.saving.prepare import Prepared, tensors_of
from casckpt.checkpoint.saving.shares import Share, Streams
from casckpt.checkpoint.saving.sources import Source
from casckpt.errors import InvalidInput
from casckpt.format.columns import Ints
from casckpt.format.digest import Hasher, cell_digest
from casckpt.format.extents import ExtentTable
from casckpt.format.sections.index import PART
from casckpt.plan.replicas import RUNS, places, row_digests, to_read_again
from casckpt.plan.writers import Holders, Words, WriteRanges
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.gpu import wait_for_gpus
from casckpt.tensors.memory import TensorMemory
from casckpt.tensors.sampling import RUN, sampled

REFUSED: Final = 0.1
"""From this relative difference on, two values of a parameter are two parameters."""
_DIGEST_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Samples:
    """Words of samples of the rows of a layout, a row each; or of their digests."""

    layout: RankLayout
    words: Words


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

    ``sets``: the rows that it shares with each set of ranks. ``shared``: see `casckpt.plan.writers.Holders.shared`.
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
        digests = np.split(row_digests(self.samples(prepared, layout, seed, RUNS, rows)), ends)
        return {number: cell_digest(mine.tobytes()) for (number, _), mine in zip(self.sets, digests, strict=True)}

    def samples(self, prepared: Prepared, layout: RankLayout, seed: int, runs: int, rows: Ints | None = None) -> Words:
        """Samples of these rows (None: of all): of tensors so many runs, of objects a digest of all.

        Not of pickles: equal objects may have different ones.
        """
        begun, held = thread_time(), layout.held
        tensors = tensors_of(prepared)
        wait_for_gpus(tensors)
        rows = np.arange(len(held)) if rows is None else rows
        words = np.zeros((len(rows), 2 * runs), np.uint64)
        is_tensor = rows < len(tensors)
        mine = rows[is_tensor]
        count, size = held.hi[mine] - held.lo[mine], held.itemsize[mine]
        last = np.maximum(count - RUN // size, 0)
        starts = places(held.name[mine] ^ held.region[mine], seed, last + 1, runs)
        in_full = np.minimum(np.arange(runs) * (RUN // size)[:, None], last[:, None])
        starts = np.where((count * size <= runs * RUN)[:, None], in_full, starts)
        words[is_tensor] = sampled([tensors[row] for row in mine.tolist()], starts, count, size)
        if len(mine) < len(rows):
            digests = object_digests(prepared, but_pickles=True)
            words[~is_tensor, 0] = digests[rows[~is_tensor] - len(tensors)]
        self.seconds += thread_time() - begun
        self.tensors += len(mine)
        return words

    def read_again(
        self, prepared: Prepared, layout: RankLayout, duty: WriteRanges, seed: int
    ) -> tuple[int, Words] | None:
        """The number of this save, and digests of the cells of others that this rank reads in it."""
        if self.shared is None:
            return None
        if self.turn is None:  # a job that is stopped after few saves is not to read the same ones each time
            self.turn = seed >> 32
        begun, tensors, found = thread_time(), tensors_of(prepared), []
        for row, lo, hi in to_read_again(layout.held, duty, self.shared, self.turn):
            start = int(layout.held.lo[row])
            found.append(_digest(TensorMemory(tensors[row]), lo - start, hi - start))
        self.seconds += thread_time() - begun
        return self.turn, _words(found)


def seed_of(run: str, step: int) -> int:
    """A number that all ranks of a save have in common, and that differs by save."""
    return int.from_bytes(cell_digest(f"{run}@{step}".encode())[:8], "little")


def whole_digests(prepared: Prepared) -> Words:
    """A digest of all of each row."""
    tensors = [_digest(TensorMemory(data), 0, data.numel()) for data in tensors_of(prepared)]
    return np.concatenate([_words(tensors), object_digests(prepared)])


def object_digests(prepared: Prepared, *, but_pickles: bool = False) -> Words:
    """A digest of each object with its large buffers; 0 of those that are left out."""
    parts: dict[tuple[str, int | None], list[bytes]] = {}
    for source in prepared.sources:
        if source.kind == PART and source.buffer is not None:
            parts.setdefault((source.key, source.rank), []).append(cell_digest(source.buffer))
    contents = [b"".join([one.data, *parts.get((one.key, one.rank), [])]) for one in prepared.objects]
    found = _words([cell_digest(content) for content in contents])
    return np.where([but_pickles and one.pickled for one in prepared.objects], np.uint64(0), found)


def _digest(memory: TensorMemory, lo: int, hi: int) -> bytes:
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
    """The beginnings of digests that are compared, and never stored."""
    return np.frombuffer(b"".join([digest[:8] for digest in digests]), np.uint64)


# rank 0


Odd: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""Rows that differ, as `casckpt.plan.writers.Holders.differing` gives them."""


def judged(
    layouts: Sequence[RankLayout],
    odd: Odd,
    words: Sequence[Mapping[int, Words] | Words],
    *,
    memory: ReplicaMemory,
    check: str,
    advice: str = "",
) -> dict[str, None]:
    """The keys, but for known ones, of what ranks do not hold alike and a save may keep one rank's value of.

    ``words``: of each rank the samples of its rows that are ``odd``. Raises InvalidInput, with more ``advice``, for
    what is not to be saved.
    """
    found: dict[str, None] = {}
    for (first, row), *others in odd:
        (_, key, _, _), dtype, _ = layouts[first].stream(row)
        if key in memory.differing and check != "raise":
            continue
        nbytes = int((layouts[first].held.hi[row] - layouts[first].held.lo[row]) * layouts[first].held.itemsize[row])
        mine = _values(words[first][row], nbytes)
        ratios = {rank: relative_difference(dtype, mine, _values(words[rank][at], nbytes)) for rank, at in others}
        other = max(ratios, key=lambda rank: ratios[rank])
        is_new = not layouts[first].may_differ[row] and key not in memory.saved
        if check == "raise" or (is_new and ratios[other] >= REFUSED):
            how = f" (relative difference {ratios[other]:.3g})"
            more = f". Give what each rank has for itself a name of its own{advice}; or pass check_replicas='off', and "
            raise _differs(key, first, other, how, f"{more}the value of one rank is saved")
        found[key] = None
    return found


def check_whole(layouts: Sequence[RankLayout], digests: Sequence[Words]) -> None:
    """Raise InvalidInput, naming key and ranks, for any row of which holders have other bytes."""
    for (first, row), *others in Holders([layout.held for layout in layouts]).differing(digests):
        other = next(rank for rank, at in others if digests[rank][at] != digests[first][row])
        raise _differs(layouts[first].stream(row)[0][1], first, other)


def _differs(key: str, one: int, other: int, how: str = "", more: str = "") -> InvalidInput:
    text = f"{key!r} differs between ranks {one} and {other}, which should hold the same{how}; nothing was saved{more}"
    return InvalidInput(text, key=key, rank=other)


def _values(words: Words, nbytes: int) -> bytes:
    """What was sampled of ``nbytes``: each element once, where that is all of them; see `Compared.samples`."""
    data, rest = words.tobytes(), nbytes % RUN
    if not rest or nbytes < RUN or nbytes >= len(data):
        return data[:nbytes]
    last = nbytes - rest
    return data[:last] + data[last + RUN - rest : last + RUN]


def relative_difference(dtype: str, one: bytes, other: bytes) -> float:
    """``|a - b| / max(|a|, |b|)`` of two lists of values, in float64. 1 for what differs and is no finite number."""
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


def differing_cells(plan: WritePlan, described: Share, told: Sequence[tuple[int, Words] | None]) -> dict[str, None]:
    """The keys of cells that other ranks hold otherwise than they were written. ``told``: of `Compared.read_again`."""
    found: dict[str, None] = {}
    for rank, again in enumerate(told):
        turn, digests = again or (0, ())
        held = plan.layouts[rank].held
        cells = to_read_again(held, plan.duties[rank], plan.shared[rank], turn)
        for digest, (row, lo, hi) in zip(digests, cells, strict=False):
            name = plan.layouts[rank].stream(row)[0]
            region = int(held.region[row]), int(held.lo[row]), int(held.hi[row])
            written = _written(described.extents[name][1], region, lo, hi)
            if written is not None and _words([written])[0] != digest:
                found[name[1]] = None
    return found


def _written(table: ExtentTable, region: tuple[int, int, int], lo: int, hi: int) -> bytes | None:
    """The digest with which a cell was written; None if that was cut elsewhere, along an older checkpoint."""
    boxes = [number for number, box in enumerate(table.boxes) if region_hash(box, *region[1:]) == region[0]]
    cells = [cell for box in boxes for cell in table.cells_in(box, lo, hi)]
    return cells[0].digest if [(cell.lo, cell.hi) for cell in cells] == [(lo, hi)] else None


# for front ends by whose rules one rank writes what several hold


def compared(samples: Sequence[Samples], memory: ReplicaMemory, check: str) -> dict[str, None]:
    """Compare the samples of all ranks; see `judged`."""
    layouts, words = [one.layout for one in samples], [one.words for one in samples]
    odd = Holders([one.held for one in layouts]).differing([row_digests(one) for one in words])
    return judged(layouts, odd, words, memory=memory, check=check)


def samples_of(sources: Sequence[Source], run: str, step: int) -> Samples:
    """Look at tensors that other ranks may hold, too."""
    prepared = Prepared(sources, [], [], b"")
    layout = layout_of(prepared, RUN)
    return Samples(layout, Compared().samples(prepared, layout, seed_of(run, step), RUNS))
