"""Compares a state in memory with a checkpoint. Reports which tensors differ, on which ranks, and where.

Each rank divides its tensors into the cells of the checkpoint, and hashes these cells. It reads stored bytes only if a
digest differs, or if it holds only part of a cell. Therefore, a comparison finds corrupted memory without a second copy
of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from casckpt.base.groups import grouped, in_batches
from casckpt.base.parallel import run_all, usable_threads, useful_threads
from casckpt.base.progress import Progress
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.format.digest import cell_digest
from casckpt.format.manifest import Manifest
from casckpt.format.records import changed
from casckpt.format.regions import Region
from casckpt.history.commits import Commit
from casckpt.loading.regions import WINDOW_BYTES, EntrySlice, RegionReader
from casckpt.loading.wrapped import forms_differ
from casckpt.plan.reuse import CellSource, ReusableCells
from casckpt.ranks.agreement import StoreIdentity, check_same, named
from casckpt.ranks.ranks import Ranks, everyone, telling
from casckpt.repository.repository import Repository
from casckpt.saving.local_entries import Cell, LocalEntry, plan_work
from casckpt.saving.prepare import tensor_source
from casckpt.tensors.gpu import wait_for_gpus
from casckpt.tensors.state import flatten

_LOT_BYTES = 8 << 20
_PLACES = 8  # the maximum number of locations that are reported for each tensor and rank


@dataclass(frozen=True, slots=True)
class Differs:
    """A tensor that differs between ``rank`` and the checkpoint.

    ``what``: "bytes", "dtype", "shape", "missing" if the checkpoint lacks it, or "description" if it consists of other
    tensors and is described differently. For "bytes", ``elements`` is the
    number of elements that differ, and ``first`` is the index of the first of them. ``where`` describes the first few
    locations as strings. Each is a box of the tensor, and a range of elements in it, in row-major order. The first and
    the last element of the range differ.
    """

    key: str
    rank: int
    what: str
    elements: int = 0
    where: tuple[str, ...] = ()
    first: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences, by rank. ``bytes``: the total number of bytes that all ranks compared."""

    differs: tuple[Differs, ...]
    bytes: int

    @property
    def is_same(self) -> bool:
        """Whether all tensors of the state are equal to those of the checkpoint."""
        return not self.differs


def compare_together(
    repo: Repository, ranks: Ranks, state: Mapping[Any, Any], ref: str | Checkpoint, resolve: Callable[[], Commit]
) -> Comparison:
    """Compare each rank's tensors. Every rank of ``ranks`` must call this, and all receive the same answer.

    Raises the errors of a load, and InvalidInput if the state is not a mapping. All ranks raise the error.
    """

    def find(given: Sequence[str]) -> list[tuple[Commit, StoreIdentity]]:
        check_same(given)
        return everyone((resolve(), StoreIdentity.of(repo)), ranks.size)

    commit, home = ranks.exchange(lambda: named(ref), find)

    def compare() -> Comparison:
        home.check(repo)
        return _compare(repo, manifests.get(repo, commit), state, ranks.rank, telling(ranks, Progress()))

    return ranks.exchange(compare, lambda comparisons: everyone(_joined(comparisons), ranks.size))


def _joined(comparisons: Sequence[Comparison]) -> Comparison:
    differs = tuple(differing for rank in comparisons for differing in rank.differs)
    return Comparison(differs, sum(rank.bytes for rank in comparisons))


def _compare(
    repo: Repository, manifest: Manifest, state: Mapping[Any, Any], rank: int, progress: Progress
) -> Comparison:
    contents, sources, unlike = Contents(manifest, rank), list[LocalEntry](), list[Differs]()
    flat = flatten(state, apart=contents.is_in_parts)
    for key, node in flat.wrappers.items():
        if (there := contents.wrappers.get(key)) is not None and any(forms_differ(node, there)):
            unlike.append(Differs(key, rank, "description"))
    tensors = {key: leaf.value for key, leaf in flat.leaves.items() if leaf.is_tensor}
    contents.ready(tensors)
    for key, tensor in tensors.items():
        source, entry = tensor_source(key, tensor, None), contents.tensors.get(key)
        if entry is None:
            unlike.append(Differs(key, rank, "missing"))
        elif (source.dtype, source.shape) != (entry.dtype, entry.shape):
            unlike.append(Differs(key, rank, "dtype" if source.shape == entry.shape else "shape"))
        else:
            sources.append(changed(source, rank=entry.rank))
    wait_for_gpus(piece.data for source in sources for piece in source.pieces)
    cells = _cells(contents, sources)
    unequal = _unequal(repo, contents, sources, _doubtful(cells, progress), progress)
    by_source = grouped(unequal, lambda place: place.source)
    differs = [_differs(sources[number].key, rank, places) for number, places in by_source.items()]
    return Comparison((*unlike, *differs), sum(cell.nbytes for cell in cells))


def holds(contents: Contents, sources: Sequence[LocalEntry]) -> bool:
    """Return whether a checkpoint has these tensors, with these bytes. Hashes them, and reads no blobs."""
    contents.ready([source.key for source in sources])
    for source in sources:
        entry = contents.tensors.get(source.key)
        if entry is None or (entry.dtype, entry.shape) != (source.dtype, source.shape):
            return False
    return not _doubtful(_cells(contents, sources), Progress())


def _cells(contents: Contents, sources: Sequence[LocalEntry]) -> list[Cell]:
    """Return the cells of these tensors as the checkpoint divides them."""
    held = CellSource.of(contents.manifest, [contents.tensors[source.key] for source in sources])
    work = plan_work(sources, contents.manifest.body.cell_bytes, ReusableCells(held, [], lambda ref: False))
    return [cell for group in work for cell in group if isinstance(cell, Cell)]


class _Unequal(NamedTuple):
    """A range whose first and last elements differ. ``elements``: how many of its elements differ."""

    source: int
    region: Region
    elements: int


def _doubtful(cells: Sequence[Cell], progress: Progress) -> list[Cell]:
    """Return the cells that have a different digest, or no digest, in the checkpoint.

    Cells do not have a digest if the checkpoint divides the tensor differently.
    """
    doubtful: set[int] = set()

    def hash_all(lot: Sequence[tuple[int, Cell]]) -> None:
        for number, cell in lot:
            if cell.known is None or cell_digest(cell.data()) != cell.known.digest:
                doubtful.add(number)
            progress(cell.nbytes)

    threads = useful_threads(usable_threads(None), sum(cell.nbytes for cell in cells), len(cells))
    run_all(hash_all, in_batches(enumerate(cells), lambda numbered: numbered[1].nbytes, _LOT_BYTES), threads)
    return [cells[number] for number in sorted(doubtful)]


def _unequal(
    repo: Repository, contents: Contents, sources: Sequence[LocalEntry], cells: Sequence[Cell], progress: Progress
) -> Iterator[_Unequal]:
    """Compare cells with the stored bytes."""
    keys = (sources[cell.source].key for cell in cells)
    parts = (
        EntrySlice(contents.tensor(key), cell.cut.lo, cell.cut.hi, cell.box)
        for key, cell in zip(keys, cells, strict=True)
    )
    reader = RegionReader(repo, contents.manifest, sum(cell.nbytes for cell in cells), progress)
    stored = reader.read(in_batches(parts, lambda part: part.nbytes, WINDOW_BYTES))
    for cell, (part, data) in zip(cells, stored, strict=True):
        places = _places(cell.data(), data, part.entry.itemsize)
        if len(places):
            lo, hi = (part.lo + int(place) for place in (places[0], places[-1]))
            yield _Unequal(cell.source, Region(cell.box, lo, hi + 1), len(places))


def _places(here: memoryview, stored: memoryview, itemsize: int) -> npt.NDArray[np.intp]:
    """Return the indices of the elements that differ in any bit."""
    one, other = (np.frombuffer(data, np.uint8).reshape(-1, itemsize) for data in (here, stored))
    return np.flatnonzero((one != other).any(axis=1))


def _differs(key: str, rank: int, places: Sequence[_Unequal]) -> Differs:
    region = places[0].region
    inside = np.unravel_index(region.lo, region.box.shape) if region.box.shape else ()
    first = tuple(base + int(at) for base, at in zip(region.box.offset, inside, strict=True))
    where = tuple(str(place.region) for place in places[:_PLACES])
    return Differs(key, rank, "bytes", sum(place.elements for place in places), where, first)
