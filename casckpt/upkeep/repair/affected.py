"""Who is hit by damage: the live cells that lie in wrong bytes, and are not what they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from casckpt.contents import manifests
from casckpt.errors import Damaged, Gone, NotFound, Refused, StorageError
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, CellDigest, ManifestId, TxId
from casckpt.history.commits import Commit, refresh
from casckpt.repository.fetching import holds_cell
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader
from casckpt.upkeep.repair.blob_check import Checked
from casckpt.upkeep.repair.cell_sources import Located, locate


@dataclass(frozen=True)
class DamagedBlob:
    """``keys``: the tensors, objects and attachments hit. ``checkpoints``: ids of the live ones that are hit.

    ``needed_by``: a commit of each of these. All are empty where nobody needs the bytes that are wrong: a header, a
    proof, or cells of what was purged.
    """

    blob: BlobHash
    uploader: TxId
    keys: tuple[str, ...]
    checkpoints: tuple[str, ...]
    why: str
    needed_by: tuple[Commit, ...] = ()


class _Cell(NamedTuple):
    """``nbytes``: of the file. ``digest``: of the cell, which may be coded there."""

    offset: int
    nbytes: int
    digest: CellDigest


@dataclass
class _Uses:
    """Live cells that meet the wrong bytes of one blob, and the (key, checkpoint) that need each.

    ``cells``: with one of the places that name it. ``unknown``: whose manifests cannot be understood, and nobody knows
    what they need.
    """

    checked: Checked
    cells: dict[_Cell, Located] = field(default_factory=dict)
    users: dict[_Cell, set[tuple[str, ManifestId]]] = field(default_factory=lambda: defaultdict(set))
    unknown: set[tuple[str, ManifestId]] = field(default_factory=set)

    def add(self, repo: Repository, manifest: Manifest, stored: StoredCell, key: str) -> None:
        """Note that ``key`` needs a cell, if it lies in wrong bytes."""
        cell = _Cell(stored.offset, stored.stored, stored.digest)
        if any(cell.offset < stop and start < cell.offset + cell.nbytes for start, stop in self.checked.ranges):
            self.users[cell].add((key, manifest.id))
            if cell not in self.cells:
                self.cells[cell] = locate(repo, manifest, stored)


def describe(repo: Repository, commits: Sequence[Commit], wrong: Sequence[Checked]) -> list[DamagedBlob]:
    """Tell who is hit by what is ``wrong``, without what only purged checkpoints used. Raises `StorageError`."""
    every = {(one.ref.uploader, one.ref.hash): _Uses(one) for one in wrong}
    used = set()
    for commit in commits if every else ():
        try:
            manifest = manifests.get(repo, commit)
            numbered = enumerate((ref.uploader, ref.hash) for ref in manifest.blobs)
            named = {number: name for number, name in numbered if name in every}
            if not named or not refresh(repo, commit).live:
                continue
            manifest.ready(objects=())
        except (Damaged, Gone, Refused):
            continue
        used |= set(named.values())
        _collect(repo, manifest, {number: every[name] for number, name in named.items()})
    by_id = {commit.id: commit for commit in commits}
    order = {id: number for number, id in enumerate(by_id)}
    told = (_described(repo, every[name], order) for name in sorted(used))
    return [replace(one, needed_by=tuple(by_id[ManifestId(id)] for id in one.checkpoints)) for one in told]


def keys_of(manifest: Manifest, wanted: Iterable[int]) -> list[str]:
    """Return the keys of the entries that need any of the blobs ``wanted``, given by their numbers."""
    numbers, found = frozenset(wanted), set()
    manifest.ready(objects=())
    for entry in manifest.held:
        try:
            if any(one.blob in numbers for extent in manifest.extents(entry).extents for one in extent.chain):
                found.add(entry.key)
        except (Damaged, Refused):
            found.add(entry.key)  # nobody can tell
    return sorted(found)


def _collect(repo: Repository, manifest: Manifest, uses: Mapping[int, _Uses]) -> None:
    """Note which cells lie in wrong bytes, of a manifest that is at hand; bases count for what is told from them."""
    for entry in manifest.held:
        try:
            table = manifest.extents(entry)
        except (Damaged, Refused):
            for one in uses.values():
                one.unknown.add((entry.key, manifest.id))
            continue
        for cell in table.cells_within(uses):
            uses[cell.blob].add(repo, manifest, cell, entry.key)


def _described(repo: Repository, uses: _Uses, order: Mapping[ManifestId, int]) -> DamagedBlob:
    ref = uses.checked.ref
    hit = uses.unknown.union(*(uses.users[cell] for cell in _wrong_cells(repo, uses)))
    checkpoints = sorted({checkpoint for _, checkpoint in hit}, key=lambda checkpoint: order[checkpoint])
    keys = tuple(sorted({key for key, _ in hit}))
    return DamagedBlob(ref.hash, ref.uploader, keys, tuple(checkpoints), uses.checked.why)


def _wrong_cells(repo: Repository, uses: _Uses) -> list[_Cell]:
    """Read the cells once more; return those that are not what was written."""
    if not uses.cells:
        return []
    ref = uses.checked.ref
    try:
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            return [cell for cell, place in uses.cells.items() if not _holds(reader, place)]
    except (NotFound, Refused, StorageError):
        return list(uses.cells)


def _holds(reader: Reader, place: Located) -> bool:
    cell, buffer = place.cell, memoryview(bytearray(place.cell.nbytes))
    return place.fill(buffer) if cell.frame else holds_cell(reader, cell.offset, buffer, cell.digest)
