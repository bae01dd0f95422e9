"""Sources of bytes for a repair: blobs with the same name, and equal cells, in this store and in others.

Repair does not trust any source. It uses bytes only if their digest is correct.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, Gone, NotFound, Refused, StorageError
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import decode_chain, undo
from casckpt.format.extents import DIGEST_BYTES, StoredCell
from casckpt.format.keys import blob_key, parse_object
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, list_commits
from casckpt.repository.fetching import holds_cell
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.upkeep.inventory import BLOB, list_objects

T = TypeVar("T")
UNREADABLE = (CasckptError, ShortObject)
FRAMES = "uint8"
"""The dtype of the part of a blob that holds frames."""


@dataclass(frozen=True, slots=True)
class EncodedSource:
    """The cell that a frame encodes: its size, the dtype of an entry that contains it, and the digest of its base."""

    nbytes: int
    dtype: str
    base: CellDigest | None


@dataclass(frozen=True, slots=True)
class LiveCell:
    """One cell that a live checkpoint has in a blob. ``offset``, ``nbytes``, ``dtype``: those of the stored bytes.

    ``digest``: the digest of the plain cell, even if the cell is stored encoded. ``coded``: None for a cell that is not
    encoded.
    """

    offset: int
    nbytes: int
    digest: CellDigest
    dtype: str
    coded: EncodedSource | None = None

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Located:
    """A cell of a manifest. ``keys``: the keys of the blobs that contain the cell and its bases, by blob number."""

    repo: Repository = field(repr=False)
    keys: Mapping[int, str]
    cell: StoredCell

    def read(self) -> bytearray:
        """Read the cell, and decode it if it is encoded. Raises Refused for a bad frame, and the errors of reading."""
        return decode_chain(self.cell, self.stored)

    def stored(self, cell: StoredCell) -> bytearray:
        """Read the stored bytes of ``cell``, which is this cell or one of its bases. Raises the errors of reading."""
        data = bytearray(cell.stored)
        with self.repo.storage.open(self.keys[cell.blob]) as reader:
            reader.read_into(cell.offset, [memoryview(data)])
        return data

    def fill(self, target: memoryview) -> bool:
        """Fill ``target`` with the cell. Return False if it cannot be read."""
        with suppress(*UNREADABLE):
            target[:] = self.read()
            return True
        return False


def locate(repo: Repository, manifest: Manifest, cell: StoredCell) -> Located:
    """Return the location of a cell of a manifest of ``repo``."""
    refs = {link.blob: manifest.blob(link.blob) for link in cell.chain}
    return Located(repo, {number: blob_key(ref.uploader, ref.hash) for number, ref in refs.items()}, cell)


def take_cell(reader: Reader, offset: int, target: memoryview, digest: CellDigest) -> bool:
    """Fill ``target`` with a cell from the reader. Return whether the digest is correct."""
    data = memoryview(bytearray(len(target)))
    if not holds_cell(reader, offset, data, digest):
        return False
    target[:] = data
    return True


class BlobCopies:
    """Blobs by hash, damaged or not: in this store, in ``others``, and in this host's cache."""

    def __init__(self, repo: Repository, others: Iterable[Repository]) -> None:
        self._cache = repo.blob_cache
        self._places: dict[str, list[tuple[Repository, str]]] = defaultdict(list)
        for store in (repo, *others):
            for key in list_objects(store):
                name = parse_object(key)
                if name is not None and name.kind == BLOB:
                    self._places[name.hash].append((store, key))

    def readers(self, ref: BlobRef) -> Iterator[Reader]:
        """Yield a reader for each copy of a blob, open until the next iteration. The caller handles read errors."""
        for store, key in self._places.get(ref.hash, ()):
            try:
                with store.storage.open(key) as reader:
                    yield reader
            except (NotFound, Refused, StorageError):
                continue
        cached = self._cache.open(ref)
        if cached is not None:
            with cached:
                yield cached


class Cells:
    """Cells by digest, in the blobs that live checkpoints of these stores name.

    If no blob holds a cell, a frame with this cell as base may recover it. This requires the decoded cell of that frame
    from another source.
    """

    def __init__(self, stores: Iterable[Repository], wanted: Iterable[CellDigest]) -> None:
        self._wanted = frozenset(wanted)
        self._places: dict[CellDigest, list[Located]] = defaultdict(list)
        # by the digest of their base
        self._deltas: dict[CellDigest, dict[tuple[str, int], Located]] = defaultdict(dict)
        self._lost: set[CellDigest] = set()
        for store in stores:
            for _, manifest in readable(store, list_commits(store).live()):
                self._learn(store, manifest)

    def _learn(self, store: Repository, manifest: Manifest) -> None:
        try:
            entries = manifest.held
        except Refused:
            return
        for entry in entries:
            try:
                table = manifest.extents(entry)
            except (Damaged, Refused):
                continue
            every = (link for extent in table.extents for link in extent.chain if self._has_wanted(link.digests))
            for cell in table.stored_cells(every):
                if cell.digest in self._wanted:
                    place = locate(store, manifest, cell)
                    self._places[cell.digest].append(place)
                    if cell.base is not None and cell.base.digest in self._wanted:
                        self._deltas[cell.base.digest][place.keys[cell.blob], cell.offset] = place

    def _has_wanted(self, digests: bytes) -> bool:
        each = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
        return not self._wanted.isdisjoint(each)

    def fetch(self, digest: CellDigest, target: memoryview) -> bool:
        """Fill ``target`` with the cell. If no source has it, leave ``target`` unchanged and return False."""
        if digest in self._lost:
            return False
        places = (place for place in self._places.get(digest, ()) if place.cell.nbytes == len(target))
        if any(place.fill(target) for place in places):
            return True
        self._lost.add(digest)  # ends the recursion if versions are deltas of each other
        deltas = [delta for delta in self._deltas.get(digest, {}).values() if delta.cell.nbytes == len(target)]
        if not any(self._undo(delta, digest, target) for delta in deltas):
            return False
        self._lost.remove(digest)
        return True

    def _undo(self, delta: Located, digest: CellDigest, target: memoryview) -> bool:
        """Fill ``target`` with the base of ``delta`` by undoing its frame. Return whether the digest is correct."""
        plain = bytearray(len(target))
        if not self.fetch(delta.cell.digest, memoryview(plain)):
            return False
        try:
            undo(memoryview(delta.stored(delta.cell)), memoryview(plain))
        except UNREADABLE:
            return False
        if cell_digest(plain) != digest:
            return False
        target[:] = plain
        return True


def readable(repo: Repository, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Manifest]]:
    """Yield each of ``commits`` that has a readable manifest, with the manifest. Raises `StorageError`."""
    for commit in commits:
        try:
            yield commit, manifests.get_with_extents(repo, commit)
        except (Damaged, Gone, Refused):
            continue


def by_number(manifest: Manifest, values: Mapping[tuple[TxId, BlobHash], T]) -> dict[int, T]:
    """Convert the keys of ``values`` from (uploader, hash) to a manifest's blob numbers."""
    names = enumerate((ref.uploader, ref.hash) for ref in manifest.blobs)
    return {number: values[name] for number, name in names if name in values}


def live_cells(manifest: Manifest, wanted: Mapping[int, BlobRef]) -> dict[BlobRef, set[LiveCell]]:
    """Return the cells and bases that a manifest has in its blobs ``wanted`` (by number). Raises `Refused`."""
    cells: dict[BlobRef, set[LiveCell]] = {ref: set() for ref in wanted.values()}
    for entry in manifest.held:
        for cell in manifest.extents(entry).cells_within(wanted):
            cells[wanted[cell.blob]].add(_live(cell, entry.dtype))
    return cells


def related(manifest: Manifest, wanted: Container[int]) -> set[CellDigest]:
    """Return the digests of the cells in the blobs ``wanted``, of their bases, and of the cells based on them."""
    return {
        link.digest
        for entry in manifest.held
        for table in [manifest.extents(entry)]
        for extent in table.extents
        if any(link.blob in wanted for link in extent.chain)
        for cell in table.stored_cells([extent])
        for link in cell.chain
    }


def _live(cell: StoredCell, dtype: str) -> LiveCell:
    if cell.frame is None:
        return LiveCell(cell.offset, cell.nbytes, cell.digest, dtype)
    coded = EncodedSource(cell.nbytes, dtype, None if cell.base is None else cell.base.digest)
    return LiveCell(cell.offset, cell.stored, cell.digest, FRAMES, coded)
