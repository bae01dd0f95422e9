"""Checkpoints that lost a blob are rewritten: the live cells that it held lie in new blobs, and the id stays.

It is an ordinary save, by the same protocol: the transaction begins, then commits are listed, and what is reused is
what a live checkpoint of that listing names. So of several that shared a lost blob the first makes a new one, with what
all of them need of it, and the others name that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeVar

from casckpt.base.digest import Buffer
from casckpt.base.groups import lots
from casckpt.contents import blobs, manifests
from casckpt.errors import Damaged
from casckpt.format.blob import order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded
from casckpt.format.draft import placed
from casckpt.format.extents import Frame, StoredCell, build
from casckpt.format.keys import uploader_folder
from casckpt.format.manifest import Manifest
from casckpt.format.names import TxId
from casckpt.format.records import Committed, changed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.history.commits import Commit, CommitList
from casckpt.plan.reuse import coded_bytes
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.blob_rebuild import CellSupply, put
from casckpt.upkeep.repair.cell_sources import LiveCell
from casckpt.upkeep.rewrite import record_of, rewrite


class RelocatedCell(NamedTuple):
    """Where a cell lies now. ``bare``: not coded any more, as it was."""

    ref: BlobRef
    offset: int
    bare: bool


K = TypeVar("K", bound=Hashable)
Old = tuple[int, int]
"""Where a cell lay: the number of its blob, and the offset in that."""


class _Moving(NamedTuple):
    """A checkpoint, its lost blobs by their numbers, and the cells of it that are not to be coded any more."""

    commit: Commit
    manifest: Manifest
    wanted: Mapping[int, BlobRef]
    bare: Mapping[Old, LiveCell]


@dataclass(frozen=True)
class Relocation:
    """Rewrites checkpoints of ``repo``. ``live``: the cells that they need, by lost blob; they come from ``source``.

    ``missing``: those of them that cannot be had.
    """

    repo: Repository
    live: Mapping[BlobRef, Collection[LiveCell]]
    missing: Mapping[BlobRef, Collection[LiveCell]]
    source: CellSupply
    _made: dict[BlobRef, dict[int, RelocatedCell]] = field(default_factory=dict)

    def relocate(self, commit: Commit, lost: Sequence[BlobRef]) -> Commit | None:
        """Rewrite ``commit`` so that it needs none of ``lost``; None if cells are missing, before anything is written.

        Raises `Conflict` if ``commit`` is not visible any more, or was changed by somebody else; `StorageError`.
        """
        manifest = manifests.get(self.repo, commit)
        names = {(ref.uploader, ref.hash): ref for ref in lost}
        numbered = enumerate((ref.uploader, ref.hash) for ref in manifest.blobs)
        wanted = {number: names[name] for number, name in numbered if name in names}
        bare = self._to_bare(manifest, wanted)
        if bare is None:
            return None
        moving = _Moving(commit, manifest, wanted, bare)
        return rewrite(self.repo, commit, lambda txid, listed: self._save(txid, listed, moving))

    def _save(self, txid: TxId, listed: CommitList, moving: _Moving) -> Committed:
        """Upload the new blobs and the manifest; return the record to commit."""
        commit, manifest, wanted, bare = moving
        refs = list(manifest.blobs)
        places = {
            (number, offset): place
            for number, ref in wanted.items()
            for offset, place in self._replacement(txid, listed, ref).items()
        }
        found = self._put(txid, bare, lambda _, cell: self._fetch(cell))
        places |= {old: RelocatedCell(ref, offset, bare=True) for old, (ref, offset) in found.items()}
        self.repo.storage.settle(uploader_folder(txid))
        numbers = dict[BlobRef, int]()
        tables = {}
        for entry in manifest.held:
            table = manifest.extents(entry)
            cells = [_moved(cell, places, refs, numbers) for cell in table.stored_cells()]
            tables[entry.number] = build(table.shape, table.itemsize, table.cell, cells)
        record = record_of(self.repo, txid, commit, placed(manifest, encode_blobs(numbers), tables))
        return changed(record, **coded_bytes(tables.values())._asdict())

    def _to_bare(self, manifest: Manifest, wanted: Mapping[int, BlobRef]) -> dict[Old, LiveCell] | None:
        """Return cells that are told from missing ones and can be had otherwise, for all who need them; None if not."""
        missing = {(number, cell.offset) for number, ref in wanted.items() for cell in self.missing[ref]}
        found = dict[Old, LiveCell]()
        for entry in manifest.held if missing else ():
            for cell in manifest.extents(entry).stored_cells():
                links = [*takewhile(lambda one: (one.blob, one.offset) not in missing, cell.chain)]
                if len(links) == len([*cell.chain]):
                    continue
                one = next(filter(self._can_be_had, reversed(links)), None)
                if one is None:
                    return None
                found[one.blob, one.offset] = LiveCell(one.offset, one.nbytes, one.digest, entry.dtype)
        return found

    def _can_be_had(self, cell: StoredCell) -> bool:
        return self.source.fetch(cell.digest, cell.nbytes) is not None

    def _replacement(self, txid: TxId, listed: CommitList, ref: BlobRef) -> dict[int, RelocatedCell]:
        """Return where the cells of ``ref`` that can be had lie in new blobs, by the offset that they had.

        These are what another rewrite has made, if that lives; else they are put.
        """
        made = self._made.get(ref)
        user = listed.commits.get(next(iter(made.values())).ref.uploader) if made else None
        if made is None or user is None or not user.live:
            made = self._made[ref] = self._upload(txid, ref)
        return made

    def _upload(self, txid: TxId, ref: BlobRef) -> dict[int, RelocatedCell]:
        """Upload what there is of the live cells of a damaged blob."""
        found, lost = self.source.mend(self.repo, ref, self.live[ref]), self.missing[ref]
        had = (cell for cell in found.cells if cell not in found.missing)
        cells = {cell.offset: cell for cell in had}  # the longest, which comes last
        bare = {cell.offset: _bare(cell) for cell in found.missing if cell not in lost}

        def data(offset: int, cell: LiveCell) -> Buffer:
            return self._fetch(cell) if offset in bare else found.part(offset, cell.nbytes)

        places = self._put(txid, cells | bare, data)
        return {old: RelocatedCell(new, offset, old in bare) for old, (new, offset) in places.items()}

    def _put(
        self, txid: TxId, cells: Mapping[K, LiveCell], data: Callable[[K, LiveCell], Buffer]
    ) -> dict[K, tuple[BlobRef, int]]:
        """Put cells, of which ``data`` gives the bytes, into new blobs; return where each lies."""
        places = dict[K, tuple[BlobRef, int]]()
        ordered = sorted(cells.items(), key=lambda one: _order(one[1]))
        for lot in lots(ordered, lambda one: one[1].nbytes, self.repo.marker.blob_bytes):
            buffer = memoryview(bytearray(buffer_bytes(padded(sum(cell.nbytes for _, cell in lot)))))
            writer, at = BlobWriter(buffer), dict[K, int]()
            for old, cell in lot:
                at[old] = put(writer, buffer, cell, data(old, cell))
            name, size = writer.finish()
            blobs.put(self.repo, txid, name, buffer[:size])
            places |= {old: (BlobRef(name, size, txid), offset) for old, offset in at.items()}
        return places

    def _fetch(self, cell: LiveCell) -> bytearray:
        found = self.source.fetch(cell.digest, cell.nbytes)
        if found is None:
            raise Damaged("a cell that could be had just now cannot any more; repair again")
        return found


def _bare(cell: LiveCell) -> LiveCell:
    """Return a cell as it is to lie if it is not coded any more."""
    return cell if cell.coded is None else LiveCell(cell.offset, cell.coded.nbytes, cell.digest, cell.coded.dtype)


def _order(cell: LiveCell) -> tuple[bool, tuple[int, str], bool, int]:
    return cell.coded is not None, order(cell.dtype), cell.nbytes < LEAF_BYTES, cell.offset


def _moved(
    cell: StoredCell, places: Mapping[Old, RelocatedCell], refs: Sequence[BlobRef], numbers: dict[BlobRef, int]
) -> StoredCell:
    """Return a cell where it lies now, and its bases, if it is still told from them; new blobs get the next numbers."""
    place = places.get((cell.blob, cell.offset)) or RelocatedCell(refs[cell.blob], cell.offset, bare=False)
    number, frame = numbers.setdefault(place.ref, len(numbers)), None
    if cell.frame is not None and not place.bare:
        frame = Frame(cell.stored, None if cell.base is None else _moved(cell.base, places, refs, numbers))
    return cell._replace(blob=number, offset=place.offset, frame=frame)
