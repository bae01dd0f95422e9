"""Sources of right bytes for what is damaged: blobs of the same name, and equal cells, in this store and in others.

Nothing here is trusted: bytes count if they have the digest that they should have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, Gone, NotFound, Refused, StorageError
from casckpt.format.digest import cell_digest
from casckpt.format.encodings import undo
from casckpt.format.encodings.chains import decode_chain
from casckpt.format.extents import DIGEST_BYTES, StoredCell
from casckpt.format.keys import blob_key, parse_object
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, list_commits
from casckpt.repository.fetching import holds_cell
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.upkeep.inventory import BLOB, list_objects

UNREADABLE = (CasckptError, ShortObject)
FRAMES = "uint8"
"""The dtype of the run of a blob in which frames lie."""


@dataclass(frozen=True, slots=True)
class EncodedSource:
    """Of which cell a frame is: its bytes, the dtype of an entry that has it, and the digest of its base."""

    nbytes: int
    dtype: str
    base: CellDigest | None


@dataclass(frozen=True, slots=True)
class LiveCell:
    """One cell that a live checkpoint has in a blob. ``offset`` and ``nbytes``: of the file; ``dtype``: of those bytes.

    ``digest``: of the cell itself, be it ``coded`` or not.
    """

    offset: int
    nbytes: int
    digest: CellDigest
    dtype: str
    coded: EncodedSource | None = None

    @property
    def end(self) -> int:
        """The byte of the file behind it."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Located:
    """A cell of a manifest. ``keys``: of the blobs in which it and its bases lie, by number."""

    repo: Repository = field(repr=False)
    keys: Mapping[int, str]
    cell: StoredCell

    def read(self) -> bytearray:
        """Read the cell, however it lies. Raises Refused where that is not what was written, and what reading does."""
        return decode_chain(self.cell, self.stored)

    def stored(self, cell: StoredCell) -> bytearray:
        """Read what lies in a blob of the cell, or of one of its bases. Raises what reading does."""
        data = bytearray(cell.stored)
        with self.repo.storage.open(self.keys[cell.blob]) as reader:
            reader.read_into(cell.offset, [memoryview(data)])
        return data

    def fill(self, target: memoryview) -> bool:
        """Fill ``target`` if the cell is there; was it?"""
        try:
            target[:] = self.read()
        except UNREADABLE:
            return False
        return True


def locate(repo: Repository, manifest: Manifest, cell: StoredCell) -> Located:
    """Return where a cell of a manifest of ``repo`` lies."""
    refs = {one.blob: manifest.blob(one.blob) for one in cell.chain}
    return Located(repo, {number: blob_key(ref.uploader, ref.hash) for number, ref in refs.items()}, cell)


def take_cell(reader: Reader, offset: int, target: memoryview, digest: CellDigest) -> bool:
    """Fill ``target`` with a cell if that is what was written, else leave it as it is; was it?"""
    found = memoryview(bytearray(len(target)))
    if not holds_cell(reader, offset, found, digest):
        return False
    target[:] = found
    return True


class BlobCopies:
    """Blobs by their name, right or not: in this store, in ``others``, and in the cache of this host."""

    def __init__(self, repo: Repository, others: Iterable[Repository]) -> None:
        self._cache = repo.blob_cache
        self._places: dict[str, list[tuple[Repository, str]]] = defaultdict(list)
        for store in (repo, *others):
            for key in list_objects(store):
                name = parse_object(key)
                if name is not None and name.kind == BLOB:
                    self._places[name.hash].append((store, key))

    def readers(self, ref: BlobRef) -> Iterator[Reader]:
        """Yield one after the other, open until the next is asked for. What fails in reading is the caller's."""
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
    """Cells by their digest, in the blobs that live checkpoints of these stores name.

    One that is nowhere is had of what is told from it, by undoing that frame: where a later version is whole.
    """

    def __init__(self, stores: Iterable[Repository], wanted: Iterable[CellDigest]) -> None:
        self._wanted = frozenset(wanted)
        self._places: dict[CellDigest, list[Located]] = defaultdict(list)
        self._told: dict[CellDigest, dict[tuple[str, int], Located]] = defaultdict(dict)  # by their base
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
            every = (one for extent in table.extents for one in extent.chain if self._hits(one.digests))
            for cell in table.stored_cells(every):
                if cell.digest in self._wanted:
                    self._place(locate(store, manifest, cell))

    def _place(self, one: Located) -> None:
        cell = one.cell
        self._places[cell.digest].append(one)
        if cell.base is not None and cell.base.digest in self._wanted:
            self._told[cell.base.digest][one.keys[cell.blob], cell.offset] = one

    def _hits(self, digests: bytes) -> bool:
        """Is one of these wanted?"""
        found = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
        return not self._wanted.isdisjoint(found)

    def fetch(self, digest: CellDigest, target: memoryview) -> bool:
        """Fill ``target`` with the cell; False, and it stays as it is, if that is not to be had."""
        if digest in self._lost:
            return False
        places = (place for place in self._places.get(digest, ()) if place.cell.nbytes == len(target))
        if any(place.fill(target) for place in places):
            return True
        self._lost.add(digest)  # so that versions which came back to each other are not gone through for ever
        told = [one for one in self._told.get(digest, {}).values() if one.cell.nbytes == len(target)]
        if not any(self._undo(one, digest, target) for one in told):
            return False
        self._lost.remove(digest)
        return True

    def _undo(self, told: Located, digest: CellDigest, target: memoryview) -> bool:
        """Fill ``target`` with the base of a cell, which is had in another way, if it comes out right; did it?"""
        plain = bytearray(len(target))
        if not self.fetch(told.cell.digest, memoryview(plain)):
            return False
        try:
            undo(memoryview(told.stored(told.cell)), memoryview(plain))
        except UNREADABLE:
            return False
        if cell_digest(plain) != digest:
            return False
        target[:] = plain
        return True


def readable(repo: Repository, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Manifest]]:
    """Yield those of ``commits`` whose manifest can be read, with the manifest. Raises `StorageError`."""
    for commit in commits:
        try:
            yield commit, manifests.get_with_extents(repo, commit)
        except (Damaged, Gone, Refused):
            continue


def live_cells(manifest: Manifest, wanted: Mapping[int, BlobRef]) -> dict[BlobRef, set[LiveCell]]:
    """Return the cells, bases too, that a manifest has in its blobs ``wanted`` (by number). Raises `Refused`."""
    found: dict[BlobRef, set[LiveCell]] = {ref: set() for ref in wanted.values()}
    for entry in manifest.held:
        for cell in manifest.extents(entry).cells_within(wanted):
            found[wanted[cell.blob]].add(_live(cell, entry.dtype))
    return found


def related(manifest: Manifest, wanted: Container[int]) -> set[CellDigest]:
    """Return the digests of the cells in blobs ``wanted``, of their bases, and what is told from them."""
    return {
        one.digest
        for entry in manifest.held
        for table in [manifest.extents(entry)]
        for extent in table.extents
        if any(one.blob in wanted for one in extent.chain)
        for cell in table.stored_cells([extent])
        for one in cell.chain
    }


def _live(cell: StoredCell, dtype: str) -> LiveCell:
    if cell.frame is None:
        return LiveCell(cell.offset, cell.nbytes, cell.digest, dtype)
    coded = EncodedSource(cell.nbytes, dtype, None if cell.base is None else cell.base.digest)
    return LiveCell(cell.offset, cell.stored, cell.digest, FRAMES, coded)
