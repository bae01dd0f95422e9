"""Relocation: rewrites a checkpoint that lost a blob, with the blob's live cells in new blobs.

A relocation follows the save protocol. After the transaction begins, casckpt lists the commits, and reuses only blobs
that a live commit in that listing names. If several checkpoints shared a lost blob, the first relocation makes new
blobs with the cells that all of them need. The other relocations use these blobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeVar

from casckpt.base.digest import Buffer
from casckpt.base.groups import in_batches
from casckpt.contents import blobs, manifests
from casckpt.errors import Damaged
from casckpt.format.blob import order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded
from casckpt.format.extents import Frame, StoredCell, build
from casckpt.format.keys import uploader_folder
from casckpt.format.manifest import Manifest, placed
from casckpt.format.names import TxId
from casckpt.format.records import Committed, changed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.history.commits import Commit, CommitList
from casckpt.plan.reuse import coded_bytes
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.blob_rebuild import CellSupply, put
from casckpt.upkeep.repair.cell_sources import LiveCell, by_number
from casckpt.upkeep.rewrite import record_of, rewrite


class RelocatedCell(NamedTuple):
    """The new location of a cell. ``bare``: the cell was encoded, and is now stored plain."""

    ref: BlobRef
    offset: int
    bare: bool


K = TypeVar("K", bound=Hashable)
Old = tuple[int, int]
"""The old location of a cell: the number of its blob, and its offset."""


@dataclass(frozen=True)
class Relocation:
    """Rewrites of checkpoints of ``repo``. ``live``: the needed cells of each lost blob, read from ``source``.

    ``missing``: the cells that no source has.
    """

    repo: Repository
    live: Mapping[BlobRef, Collection[LiveCell]]
    missing: Mapping[BlobRef, Collection[LiveCell]]
    source: CellSupply
    _made: dict[BlobRef, dict[int, RelocatedCell]] = field(default_factory=dict)

    def relocate(self, commit: Commit, lost: Sequence[BlobRef]) -> Commit | None:
        """Rewrite ``commit`` without the blobs in ``lost``. If cells are missing, write nothing and return None.

        Raises `Conflict` if ``commit`` is no longer visible or another process changed it, and `StorageError`.
        """
        manifest = manifests.get(self.repo, commit)
        wanted = by_number(manifest, {(ref.uploader, ref.hash): ref for ref in lost})
        bare = self._to_bare(manifest, wanted)
        if bare is None:
            return None

        def save(txid: TxId, listed: CommitList) -> Committed:
            refs = list(manifest.blobs)
            places = {
                (number, offset): place
                for number, ref in wanted.items()
                for offset, place in self._replacement(txid, listed, ref).items()
            }
            plain = self._put(txid, bare, lambda _, cell: self._fetch(cell))
            places |= {old: RelocatedCell(ref, offset, bare=True) for old, (ref, offset) in plain.items()}
            self.repo.storage.settle(uploader_folder(txid))
            numbers = dict[BlobRef, int]()
            tables = {}
            for entry in manifest.held:
                table = manifest.extents(entry)
                cells = [_moved(cell, places, refs, numbers) for cell in table.stored_cells()]
                tables[entry.number] = build(table.shape, table.itemsize, table.cell, cells)
            record = record_of(self.repo, txid, commit, placed(manifest, encode_blobs(numbers), tables))
            return changed(record, **coded_bytes(tables.values())._asdict())

        return rewrite(self.repo, commit, save)

    def _to_bare(self, manifest: Manifest, wanted: Mapping[int, BlobRef]) -> dict[Old, LiveCell] | None:
        """Return the cells to store plain because their base is missing, or None if a cell cannot be recovered."""
        missing = {(number, cell.offset) for number, ref in wanted.items() for cell in self.missing[ref]}
        bare = dict[Old, LiveCell]()
        for entry in manifest.held if missing else ():
            for cell in manifest.extents(entry).stored_cells():
                links = [*takewhile(lambda link: (link.blob, link.offset) not in missing, cell.chain)]
                if len(links) == len([*cell.chain]):
                    continue
                usable = (link for link in reversed(links) if self.source.fetch(link.digest, link.nbytes) is not None)
                link = next(usable, None)
                if link is None:
                    return None
                bare[link.blob, link.offset] = LiveCell(link.offset, link.nbytes, link.digest, entry.dtype)
        return bare

    def _replacement(self, txid: TxId, listed: CommitList, ref: BlobRef) -> dict[int, RelocatedCell]:
        """Return the new locations of the available cells of ``ref``, keyed by old offset.

        Uses the blobs of another rewrite if that rewrite is live. Otherwise uploads new blobs.
        """
        made = self._made.get(ref)
        user = listed.commits.get(next(iter(made.values())).ref.uploader) if made else None
        if made is None or user is None or not user.live:
            made = self._made[ref] = self._upload(txid, ref)
        return made

    def _upload(self, txid: TxId, ref: BlobRef) -> dict[int, RelocatedCell]:
        """Upload those live cells of a damaged blob that a source has."""
        rebuilt, lost = self.source.rebuild(self.repo, ref, self.live[ref]), self.missing[ref]
        right = (cell for cell in rebuilt.cells if cell not in rebuilt.missing)
        cells = {cell.offset: cell for cell in right}  # of several cells at one offset, keep the longest, which is last
        bare = {cell.offset: _bare(cell) for cell in rebuilt.missing if cell not in lost}

        def data(offset: int, cell: LiveCell) -> Buffer:
            return self._fetch(cell) if offset in bare else rebuilt.part(offset, cell.nbytes)

        places = self._put(txid, cells | bare, data)
        return {old: RelocatedCell(new, offset, old in bare) for old, (new, offset) in places.items()}

    def _put(
        self, txid: TxId, cells: Mapping[K, LiveCell], data: Callable[[K, LiveCell], Buffer]
    ) -> dict[K, tuple[BlobRef, int]]:
        """Put cells into new blobs, and return the location of each. ``data`` returns the bytes of a cell."""
        places = dict[K, tuple[BlobRef, int]]()
        ordered = sorted(cells.items(), key=lambda item: _order(item[1]))
        for lot in in_batches(ordered, lambda item: item[1].nbytes, self.repo.marker.blob_bytes):
            buffer = memoryview(bytearray(buffer_bytes(padded(sum(cell.nbytes for _, cell in lot)))))
            writer, at = BlobWriter(buffer), dict[K, int]()
            for old, cell in lot:
                at[old] = put(writer, buffer, cell, data(old, cell))
            name, size = writer.finish()
            blobs.put(self.repo, txid, name, buffer[:size])
            places |= {old: (BlobRef(name, size, txid), offset) for old, offset in at.items()}
        return places

    def _fetch(self, cell: LiveCell) -> bytearray:
        data = self.source.fetch(cell.digest, cell.nbytes)
        if data is None:
            raise Damaged("a cell can no longer be read; repair again")
        return data


def _bare(cell: LiveCell) -> LiveCell:
    """Return a cell without its encoding."""
    return cell if cell.coded is None else LiveCell(cell.offset, cell.coded.nbytes, cell.digest, cell.coded.dtype)


def _order(cell: LiveCell) -> tuple[bool, tuple[int, str], bool, int]:
    return cell.coded is not None, order(cell.dtype), cell.nbytes < LEAF_BYTES, cell.offset


def _moved(
    cell: StoredCell, places: Mapping[Old, RelocatedCell], refs: Sequence[BlobRef], numbers: dict[BlobRef, int]
) -> StoredCell:
    """Return a cell at its new location, with its bases if it is still encoded. New blobs get the next numbers."""
    place = places.get((cell.blob, cell.offset)) or RelocatedCell(refs[cell.blob], cell.offset, bare=False)
    number, frame = numbers.setdefault(place.ref, len(numbers)), None
    if cell.frame is not None and not place.bare:
        frame = Frame(cell.stored, None if cell.base is None else _moved(cell.base, places, refs, numbers))
    return cell._replace(blob=number, offset=place.offset, frame=frame)
