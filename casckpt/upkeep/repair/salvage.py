"""Sources of right bytes for what is damaged: whole blobs and single cells, in this store and in others.

Nothing here is trusted: a blob counts if it has the hash in its name, a cell if it has its digest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, Refused, StorageError
from casckpt.format.blob import DATA_OFFSET, encode_header
from casckpt.format.digest import cell_digest, hex_digest
from casckpt.format.extents import ExtentTable
from casckpt.format.keys import blob_key, parse_object
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository import manifests
from casckpt.repository.commits import Commit, list_commits
from casckpt.repository.fetching import Spoilt, fetch, holds_cell
from casckpt.repository.repository import Repository
from casckpt.storage.base import ShortObject
from casckpt.upkeep.stock import BLOB, list_objects


@dataclass(frozen=True, slots=True)
class LiveCell:
    """One cell that a live checkpoint has in a blob. ``offset`` and ``nbytes``: of the file."""

    offset: int
    nbytes: int
    digest: CellDigest
    dtype: str


@dataclass(frozen=True, slots=True)
class _CellCopy:
    repo: Repository = field(repr=False)
    key: str
    offset: int
    nbytes: int

    def fill(self, target: memoryview, digest: CellDigest) -> bool:
        """Fill ``target``; does it have ``digest`` then?"""
        try:
            with self.repo.storage.open(self.key) as reader:
                return holds_cell(reader, self.offset, target, digest)
        except (NotFound, StorageError):
            return False


@dataclass
class Salvaged:
    """What could be had of a damaged blob. ``missing``: the live cells that could not; ``data``: all others."""

    ref: BlobRef
    data: bytearray
    cells: Sequence[LiveCell]
    missing: frozenset[LiveCell]

    @property
    def is_whole(self) -> bool:
        """Does it have the hash in its name again?"""
        return hex_digest(self.data) == self.ref.hash


class BlobCopies:
    """Blobs by their hash, in this store and in ``others``."""

    def __init__(self, repo: Repository, others: Iterable[Repository]) -> None:
        self._uploaders: dict[str, list[tuple[Repository, TxId]]] = defaultdict(list)
        for store in (repo, *others):
            for key in list_objects(store):
                name = parse_object(key)
                if name is not None and name.kind == BLOB:
                    self._uploaders[name.hash].append((store, name.uploader))

    def find(self, ref: BlobRef) -> memoryview | None:
        """Find bytes that have the hash of ``ref``, wherever they lie; None if there are none."""
        for store, uploader in self._uploaders.get(ref.hash, ()):
            try:
                return fetch(store.storage, replace(ref, uploader=uploader), memoryview(bytearray(ref.size)))
            except (Spoilt, Refused, StorageError):
                continue
        return None


class Cells:
    """Cells by their digest, in the blobs that live checkpoints of these stores name."""

    def __init__(self, stores: Iterable[Repository], wanted: Iterable[CellDigest]) -> None:
        self._wanted = frozenset(wanted)
        self._heads = np.array([int.from_bytes(digest[:8], "little") for digest in self._wanted], dtype="<u8")
        self._places: dict[CellDigest, list[_CellCopy]] = defaultdict(list)
        for store in stores:
            for _, manifest in readable(store, list_commits(store).live()):
                self._learn(store, manifest)

    def _learn(self, store: Repository, manifest: Manifest) -> None:
        for entry in manifest.entries:
            try:
                table = manifest.extents(entry)
            except (Damaged, Refused):
                continue
            for cell in table.stored_cells(self._hits(table)):
                if cell.digest in self._wanted:
                    ref = manifest.blob(cell.blob)
                    found = _CellCopy(store, blob_key(ref.uploader, ref.hash), cell.offset, cell.nbytes)
                    self._places[cell.digest].append(found)

    def _hits(self, table: ExtentTable) -> list[int]:
        """Return the extents that may have a wanted cell, by the first bytes of the digests."""
        heads = np.ascontiguousarray(table.columns.digests[:, :8]).view("<u8").reshape(-1)
        rows = np.flatnonzero(np.isin(heads, self._heads))
        extents: list[int] = np.unique(np.searchsorted(table.first_cell, rows, side="right") - 1).tolist()
        return extents

    def fetch(self, digest: CellDigest, target: memoryview) -> bool:
        """Fill ``target`` with the cell; False if it is not to be had."""
        places = (place for place in self._places.get(digest, ()) if place.nbytes == len(target))
        return any(place.fill(target, digest) for place in places)


def readable(repo: Repository, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Manifest]]:
    """Yield those of ``commits`` whose manifest can be read, with it. Raises `StorageError`."""
    for commit in commits:
        try:
            found = manifests.get(repo, commit)
            found.ready(objects=())
            yield commit, found
        except (Conflict, Damaged, Refused):
            continue


def live_cells(manifest: Manifest, wanted: Mapping[int, BlobRef]) -> dict[BlobRef, set[LiveCell]]:
    """Return the cells that a manifest has in its blobs ``wanted`` (by number). Raises `Refused`."""
    found: dict[BlobRef, set[LiveCell]] = {ref: set() for ref in wanted.values()}
    for entry in manifest.entries:
        table = manifest.extents(entry)
        for cell in table.stored_cells(np.flatnonzero(np.isin(table.columns.blob, list(wanted))).tolist()):
            found[wanted[cell.blob]].add(LiveCell(cell.offset, cell.nbytes, cell.digest, entry.dtype))
    return found


def salvage(repo: Repository, ref: BlobRef, cells: Iterable[LiveCell], source: Cells) -> Salvaged:
    """Read what is left of a damaged blob, and put its live ``cells`` right from elsewhere where that is possible."""
    data = _remains(repo, ref)
    ordered = sorted(cells, key=lambda cell: (cell.offset, cell.nbytes))
    missing = set()
    for cell in ordered:
        part = memoryview(data)[cell.offset : cell.offset + cell.nbytes]
        if cell_digest(part) != cell.digest and not source.fetch(cell.digest, part):
            missing.add(cell)
    found = Salvaged(ref, data, ordered, frozenset(missing))
    if not missing and not found.is_whole:
        _put_header(data, ordered)
    return found


def _remains(repo: Repository, ref: BlobRef) -> bytearray:
    """Read the bytes of a damaged blob, zeros where there are none."""
    data = bytearray(ref.size)
    try:
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            have = min(reader.size, ref.size)
            reader.read_into(0, [memoryview(data)[:have]])
    except (NotFound, StorageError, ShortObject):
        pass  # then every byte must come from elsewhere
    return data


def _put_header(data: bytearray, cells: Sequence[LiveCell]) -> None:
    """Put the header that these cells would have, if they are all that the blob holds."""
    end, runs = DATA_OFFSET, []
    for cell in cells:
        if cell.offset > end:
            return  # there were dead cells in between
        if cell.offset == end:  # else it is one that entries of several dtypes share
            runs.append((cell.dtype, cell.nbytes))
            end += cell.nbytes
    if end == len(data):
        try:
            data[:DATA_OFFSET] = encode_header(runs)
        except InvalidInput:
            return
