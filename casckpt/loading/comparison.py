"""A live state against a checkpoint: which tensors differ, on which ranks, and where.

Each rank cuts what it holds along the cells of the checkpoint, and hashes them. Only where a digest differs, or a cell
is not all here, the stored bytes are read. So memory that was corrupted is found without another copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from casckpt.base.groups import grouped, lots
from casckpt.base.parallel import run_all, usable_threads, useful_threads
from casckpt.base.progress import Progress
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint
from casckpt.format.digest import cell_digest
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Region
from casckpt.format.sections.index import Entry
from casckpt.history.commits import Commit
from casckpt.loading.contents import Contents
from casckpt.loading.regions import Part, RegionReader
from casckpt.plan.reuse import ManifestCells, ReusableCells
from casckpt.ranks.agreement import StoreIdentity, check_same, named
from casckpt.ranks.ranks import Ranks, everyone, telling
from casckpt.repository.repository import Repository
from casckpt.saving.local_entries import Cell, LocalEntry, plan_work
from casckpt.saving.prepare import tensor_source
from casckpt.tensors.gpu import wait_for_gpus
from casckpt.tensors.state import flatten

_LOOK_BYTES = 8 << 20
_PLACES = 8  # of a tensor that differs on one rank, that are told


@dataclass(frozen=True, slots=True)
class Differs:
    """A tensor of which ``rank`` does not hold what the checkpoint has.

    ``what``: "bytes", "dtype", "shape", or "missing" where the checkpoint does not have it. Of bytes, ``elements``: how
    many differ; ``where``: the first places as text, each a box of the tensor, and a range of elements in it in
    row-major order that begins and ends with one that differs; ``first``: the index in the tensor of the very first.
    """

    key: str
    rank: int
    what: str
    elements: int = 0
    where: tuple[str, ...] = ()
    first: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs, by rank. ``bytes``: that were compared, over all ranks."""

    differs: tuple[Differs, ...]
    bytes: int

    @property
    def is_same(self) -> bool:
        """Whether all tensors of the state are what the checkpoint has."""
        return not self.differs


def compare_together(
    repo: Repository, ranks: Ranks, state: Mapping[Any, Any], ref: str | Checkpoint, resolve: Callable[[], Commit]
) -> Comparison:
    """Compare the tensors that each rank holds; every rank of ``ranks`` calls it, and all get the same answer.

    Raises what a load does, and InvalidInput for what is no state; on all ranks alike.
    """

    def find(given: Sequence[str]) -> list[tuple[Commit, StoreIdentity]]:
        check_same(given)
        return everyone((resolve(), StoreIdentity.of(repo)), ranks.size)

    commit, home = ranks.exchange(lambda: named(ref), find)

    def mine() -> Comparison:
        home.check(repo)
        manifest = manifests.get(repo, commit)
        return _compare(repo, manifest, state, ranks.rank, telling(ranks, Progress()))

    return ranks.exchange(mine, lambda found: everyone(_joined(found), ranks.size))


def _joined(found: Sequence[Comparison]) -> Comparison:
    return Comparison(tuple(one for rank in found for one in rank.differs), sum(rank.bytes for rank in found))


def _compare(
    repo: Repository, manifest: Manifest, state: Mapping[Any, Any], rank: int, progress: Progress
) -> Comparison:
    contents, sources, unlike = Contents(manifest, rank), list[LocalEntry](), list[Differs]()
    tensors = {key: leaf.value for key, leaf in flatten(state).leaves.items() if leaf.is_tensor}
    contents.ready(tensors)
    for key, tensor in tensors.items():
        source, entry = tensor_source(key, tensor, None), contents.tensor(key)
        what = _unlike(source, entry)
        if entry is None or what is not None:
            unlike.append(Differs(key, rank, what or "missing"))
        else:
            sources.append(replace(source, rank=entry.rank))
    wait_for_gpus(piece.data for source in sources for piece in source.pieces)
    known = ReusableCells(ManifestCells(manifest), [], lambda ref: False)
    cells = [cell for group in plan_work(sources, manifest.body.cell_bytes, known) for cell in group]
    unequal = _unequal(repo, contents, sources, _doubtful(cells, progress), progress)
    by_source = grouped(unequal, lambda one: one.source)
    found = [_differs(sources[number].key, rank, places) for number, places in by_source.items()]
    return Comparison((*unlike, *found), sum(cell.nbytes for cell in cells))


class _Unequal(NamedTuple):
    """A range of elements that begins and ends with one that differs, so many ``elements`` in all."""

    source: int
    region: Region
    elements: int


def _unlike(source: LocalEntry, entry: Entry | None) -> str | None:
    if entry is not None and source.shape != entry.shape:
        return "shape"
    return "dtype" if entry is not None and source.dtype != entry.dtype else None


def _doubtful(cells: Sequence[Cell], progress: Progress) -> list[Cell]:
    """Return those of which the checkpoint has another digest, or none: it is not cut there."""
    found: set[int] = set()

    def look(lot: Sequence[tuple[int, Cell]]) -> None:
        for number, cell in lot:
            if cell.known is None or cell_digest(cell.data()) != cell.known.digest:
                found.add(number)
            progress(cell.nbytes)

    nbytes = sum(cell.nbytes for cell in cells)
    threads = useful_threads(usable_threads(None), nbytes, len(cells))
    run_all(look, lots(enumerate(cells), lambda one: one[1].nbytes, _LOOK_BYTES), threads)
    return [cells[number] for number in sorted(found)]


def _unequal(
    repo: Repository, contents: Contents, sources: Sequence[LocalEntry], cells: Sequence[Cell], progress: Progress
) -> Iterator[_Unequal]:
    """Compare cells with what is stored."""
    entries = [contents.stored_tensor(sources[cell.source].key) for cell in cells]
    regions = [Region(cell.group.box, cell.cut.lo, cell.cut.hi) for cell in cells]
    reader = RegionReader(repo, contents.manifest, sum(cell.nbytes for cell in cells), progress)
    stored = reader.read(map(Part, entries, regions))
    for cell, (part, data) in zip(cells, stored, strict=True):
        places = _places(cell.data(), data, part.entry.itemsize)
        if len(places):
            lo, hi = (part.region.lo + int(place) for place in (places[0], places[-1]))
            yield _Unequal(cell.source, Region(part.region.box, lo, hi + 1), len(places))


def _places(mine: memoryview, theirs: memoryview, itemsize: int) -> npt.NDArray[np.intp]:
    """Return the numbers of the elements that differ in any bit."""
    one, other = (np.frombuffer(data, np.uint8).reshape(-1, itemsize) for data in (mine, theirs))
    return np.flatnonzero((one != other).any(axis=1))


def _differs(key: str, rank: int, found: Sequence[_Unequal]) -> Differs:
    region = found[0].region
    inside = np.unravel_index(region.lo, region.box.shape) if region.box.shape else ()
    first = tuple(base + int(at) for base, at in zip(region.box.offset, inside, strict=True))
    where = tuple(str(one.region) for one in found[:_PLACES])
    return Differs(key, rank, "bytes", sum(one.elements for one in found), where, first)
