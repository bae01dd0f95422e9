"""Sources of right bytes for what is damaged: blobs of the same name, and equal cells, in this store and in others.

Nothing here is trusted: bytes count if they have the digest that they should have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from casckpt.errors import Conflict, Damaged, NotFound, Refused, StorageError
from casckpt.format.extents import DIGEST_BYTES
from casckpt.format.keys import blob_key, parse_object
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository import manifests
from casckpt.repository.commits import Commit, list_commits
from casckpt.repository.fetching import holds_cell
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader
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
        """Fill ``target`` if this is the cell with that digest; was it?"""
        try:
            with self.repo.storage.open(self.key) as reader:
                return take_cell(reader, self.offset, target, digest)
        except (NotFound, StorageError):
            return False


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
    """Cells by their digest, in the blobs that live checkpoints of these stores name."""

    def __init__(self, stores: Iterable[Repository], wanted: Iterable[CellDigest]) -> None:
        self._wanted = frozenset(wanted)
        self._places: dict[CellDigest, list[_CellCopy]] = defaultdict(list)
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
            for cell in table.stored_cells(extent for extent in table.extents if self._hits(extent.digests)):
                if cell.digest in self._wanted:
                    ref = manifest.blob(cell.blob)
                    found = _CellCopy(store, blob_key(ref.uploader, ref.hash), cell.offset, cell.nbytes)
                    self._places[cell.digest].append(found)

    def _hits(self, digests: bytes) -> bool:
        """Is one of these wanted?"""
        found = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
        return not self._wanted.isdisjoint(found)

    def fetch(self, digest: CellDigest, target: memoryview) -> bool:
        """Fill ``target`` with the cell; False, and it stays as it is, if that is not to be had."""
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
    for entry in manifest.held:
        table = manifest.extents(entry)
        for cell in table.stored_cells(extent for extent in table.extents if extent.blob in wanted):
            found[wanted[cell.blob]].add(LiveCell(cell.offset, cell.nbytes, cell.digest, entry.dtype))
    return found
