"""Finds the keys and checkpoints that a damaged blob affects, by the live cells in its wrong bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, Gone, NotFound, Refused, StorageError
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, CellDigest, ManifestId, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, exists
from casckpt.repository.fetching import holds_cell
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.upkeep.repair.blob_check import Checked
from casckpt.upkeep.repair.frames import Located, locate


@dataclass(frozen=True)
class DamagedBlob:
    """A damaged blob, with the affected keys and checkpoints.

    ``keys``: the affected tensors, objects and attachments. ``checkpoints``: ids of the affected live checkpoints.
    ``needed_by``: one commit for each of these. All are empty if no checkpoint needs the wrong bytes, for example if
    they are in a header, in a proof, or in cells of purged checkpoints.
    """

    blob: BlobHash
    uploader: TxId
    keys: tuple[str, ...]
    checkpoints: tuple[str, ...]
    why: str
    needed_by: tuple[Commit, ...] = ()


_Cell = tuple[int, int, CellDigest]
"""A cell's offset and size in a blob's file, and its digest. The cell may be encoded there."""


@dataclass
class _Uses:
    """Live cells that overlap the wrong bytes of one blob, and the (key, checkpoint) pairs that need each cell.

    ``cells``: each cell with one of its locations. ``unknown``: pairs with unreadable extents, whose cells are unknown.
    """

    checked: Checked
    cells: dict[_Cell, Located] = field(default_factory=dict)
    users: dict[_Cell, set[tuple[str, ManifestId]]] = field(default_factory=lambda: defaultdict(set))
    unknown: set[tuple[str, ManifestId]] = field(default_factory=set)

    def add(self, repo: Repository, manifest: Manifest, stored: StoredCell, key: str) -> None:
        """If the cell overlaps wrong bytes, note that ``key`` needs it."""
        cell = (stored.offset, stored.stored, stored.digest)
        end = stored.offset + stored.stored
        if any(stored.offset < stop and start < end for start, stop in self.checked.ranges):
            self.users[cell].add((key, manifest.id))
            if cell not in self.cells:
                self.cells[cell] = locate(repo, manifest, stored)


def describe(repo: Repository, commits: Sequence[Commit], wrong: Sequence[Checked]) -> list[DamagedBlob]:
    """Return the effects of the ``wrong`` blobs. Omit blobs that only purged checkpoints and trimmed places used.

    Raises `StorageError`.
    """
    every = {(blob.ref.uploader, blob.ref.hash): _Uses(blob) for blob in wrong}
    used = dict[BlobRef, _Uses]()
    for commit in commits if every else ():
        try:
            manifest = manifests.get(repo, commit)
            uses = _by_number(manifest, every)
            if not uses or not exists(repo, commit):
                continue
            manifest.ready(objects=())
        except (Damaged, Gone, Refused):
            continue
        used |= {blob.checked.ref: blob for blob in uses.values()}
        _collect(repo, manifest, uses)
    by_id = {commit.id: commit for commit in commits}
    ordered = sorted(used, key=lambda ref: (ref.uploader, ref.hash))
    return [_described(repo, used[ref], by_id) for ref in ordered]


def keys_of(manifest: Manifest, wanted: Iterable[int]) -> list[str]:
    """Return the keys of the entries that need a blob in ``wanted`` (numbers)."""
    numbers, keys = frozenset(wanted), set()
    manifest.ready(objects=())
    for entry in manifest.held:
        try:
            if any(link.blob in numbers for extent in manifest.extents(entry).extents for link in extent.chain):
                keys.add(entry.key)
        except (Damaged, Refused):
            keys.add(entry.key)  # unreadable extents, so the entry may need the blobs
    return sorted(keys)


def _by_number(manifest: Manifest, uses: Mapping[tuple[TxId, BlobHash], _Uses]) -> dict[int, _Uses]:
    """Convert the keys of ``uses`` from (uploader, hash) to a manifest's blob numbers."""
    names = enumerate((ref.uploader, ref.hash) for ref in manifest.blobs)
    return {number: uses[name] for number, name in names if name in uses}


def _collect(repo: Repository, manifest: Manifest, uses: Mapping[int, _Uses]) -> None:
    """Note which cells of a manifest overlap wrong bytes.

    A wrong base counts for each cell that is decoded against it.
    """
    for entry in manifest.held:
        try:
            table = manifest.extents(entry)
        except (Damaged, Refused):
            for blob in uses.values():
                blob.unknown.add((entry.key, manifest.id))
            continue
        for cell in table.cells_within(uses):
            uses[cell.blob].add(repo, manifest, cell, entry.key)


def _described(repo: Repository, uses: _Uses, by_id: Mapping[ManifestId, Commit]) -> DamagedBlob:
    ref = uses.checked.ref
    hit = uses.unknown.union(*(uses.users[cell] for cell in _wrong_cells(repo, uses)))
    ids = {id for _, id in hit}
    needed_by = tuple(commit for id, commit in by_id.items() if id in ids)
    keys, checkpoints = tuple(sorted({key for key, _ in hit})), tuple(commit.id for commit in needed_by)
    return DamagedBlob(ref.hash, ref.uploader, keys, checkpoints, uses.checked.why, needed_by)


def _wrong_cells(repo: Repository, uses: _Uses) -> list[_Cell]:
    """Reread the cells, and return those with a wrong digest."""
    if not uses.cells:
        return []
    ref = uses.checked.ref
    try:
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            return [cell for cell, place in uses.cells.items() if not _holds(reader, place)]
    except (NotFound, Refused, StorageError):
        return list(uses.cells)


def _holds(reader: Reader, place: Located) -> bool:
    cell = place.cell
    if not cell.frame:
        return holds_cell(reader, cell.offset, memoryview(bytearray(cell.nbytes)), cell.digest)
    try:
        place.read()
    except (CasckptError, ShortObject):
        return False
    return True
