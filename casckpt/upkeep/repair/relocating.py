"""Checkpoints that lost a blob are rewritten: the live cells that it held lie in new blobs, and the id stays.

It is an ordinary save, by the same protocol: the transaction begins, then commits are listed, and what is reused is
what a live checkpoint of that listing names. So of several that shared a lost blob the first makes a new one, with what
all of them need of it, and the others name that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from casckpt.errors import Damaged
from casckpt.format.blob import order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded
from casckpt.format.draft import Encoded, placed
from casckpt.format.extents import ExtentTable, Frame, StoredCell, build
from casckpt.format.keys import uploader_folder
from casckpt.format.names import TxId
from casckpt.format.records import Committed, changed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.plan.lots import lots
from casckpt.plan.reuse import coded_bytes
from casckpt.repository import blobs, manifests
from casckpt.repository.commits import Commit, CommitList
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.mending import Mending, Source, put
from casckpt.upkeep.repair.salvage import LiveCell, live_cells
from casckpt.upkeep.rewriting import rewrite


class Place(NamedTuple):
    """Where a cell lies now. ``bare``: not coded any more, as it was."""

    ref: BlobRef
    offset: int
    bare: bool


Places = dict[int, Place]
"""Of each cell of a blob, by the offset that it had."""


@dataclass(frozen=True)
class Relocation:
    """Rewrites checkpoints of ``repo``. ``live``: the cells that they need, by lost blob; they come from ``source``."""

    repo: Repository
    live: Mapping[BlobRef, Collection[LiveCell]]
    source: Source
    _made: dict[BlobRef, Places] = field(default_factory=dict)

    def relocate(self, commit: Commit, lost: Sequence[BlobRef]) -> Commit | None:
        """Rewrite ``commit`` so that it needs none of ``lost``; None if cells are missing.

        Raises `Conflict` if ``commit`` is not visible any more, or was changed by somebody else; `StorageError`.
        """
        return rewrite(self.repo, commit, lambda txid, listed: self._save(txid, listed, commit, lost))

    def _save(self, txid: TxId, listed: CommitList, commit: Commit, lost: Sequence[BlobRef]) -> Committed | None:
        """Upload the new blobs and the manifest; return the record to commit."""
        manifest = manifests.get(self.repo, commit)
        names = {(ref.uploader, ref.hash): ref for ref in lost}
        refs = list(manifest.blobs)
        wanted = {i: names[r.uploader, r.hash] for i, r in enumerate(refs) if (r.uploader, r.hash) in names}
        needed = live_cells(manifest, wanted)
        moved: dict[int, Places] = {}
        for index, ref in wanted.items():
            new = self._replacement(txid, listed, ref, needed[ref])
            if new is None:
                return None
            moved[index] = new
            refs[index], *more = dict.fromkeys(new[cell.offset].ref for cell in needed[ref])
            refs += more
        self.repo.storage.settle(uploader_folder(txid))
        numbers = {ref: number for number, ref in enumerate(refs)}
        tables = {
            entry.number: made
            for entry in manifest.entries
            if (made := _moved_table(manifest.extents(entry), moved, numbers)) is not None
        }
        record = record_of(self.repo, txid, commit, placed(manifest, encode_blobs(refs), tables))
        every = (tables.get(entry.number) or manifest.extents(entry) for entry in manifest.entries)
        return changed(record, **coded_bytes(every)._asdict())

    def _replacement(self, txid: TxId, listed: CommitList, ref: BlobRef, needed: Set[LiveCell]) -> Places | None:
        """Return where the cells of ``ref`` lie in new blobs; None if some of ``needed`` are missing.

        They are those that another rewrite has made, if that lives; else they are put.
        """
        made = self._made.get(ref)
        user = None if made is None else listed.commits.get(next(iter(made.values())).ref.uploader)
        if made is None or user is None or not user.live:
            found = self.source.mend(self.repo, ref, self.live[ref])
            if not needed or any(self.source.plain(cell) is None for cell in found.missing & needed):
                return None  # of nothing no blob can be made
            made = self._made[ref] = self._upload(txid, found)
        return made if {cell.offset for cell in needed} <= made.keys() else None

    def _upload(self, txid: TxId, found: Mending) -> Places:
        """Upload what there is of the live cells of a damaged blob; return where it lies."""
        cells = {
            cell.offset: cell for cell in found.cells if cell not in found.missing
        }  # the longest, which comes last
        bare = {cell.offset: _bare(cell) for cell in found.missing if self.source.plain(cell) is not None}
        places = Places()
        for lot in lots(sorted((cells | bare).values(), key=_order), attrgetter("nbytes"), self.repo.marker.blob_bytes):
            buffer = memoryview(bytearray(buffer_bytes(padded(sum(cell.nbytes for cell in lot)))))
            writer, at = BlobWriter(buffer), dict[int, int]()
            for cell in lot:
                data = found.part(cell.offset, cell.nbytes) if cell.offset not in bare else self._fetch(cell)
                at[cell.offset] = put(writer, buffer, cell, data)
            name, size = writer.finish()
            blobs.put(self.repo, txid, name, buffer[:size])
            places |= {old: Place(BlobRef(name, size, txid), new, old in bare) for old, new in at.items()}
        return places

    def _fetch(self, cell: LiveCell) -> bytearray:
        found = self.source.fetch(cell.digest, cell.nbytes)
        if found is None:
            raise Damaged("a cell that could be had just now cannot any more; repair again")
        return found


def record_of(repo: Repository, txid: TxId, commit: Commit, made: Encoded) -> Committed:
    """Put a manifest, and return the record of a rewrite of ``commit`` that has it. Raises `StorageError`."""
    manifests.put_encoded(repo, txid, made)
    places = {"txid": txid, "head": made.head, "manifest_bytes": len(made.data)}
    return changed(commit.committed, time=repo.clock(), **places)


def _bare(cell: LiveCell) -> LiveCell:
    """Return a cell as it is to lie if it is not coded any more."""
    return cell if cell.coded is None else LiveCell(cell.offset, cell.coded.nbytes, cell.digest, cell.coded.dtype)


def _order(cell: LiveCell) -> tuple[bool, tuple[int, str], bool, int]:
    return cell.coded is not None, order(cell.dtype), cell.nbytes < LEAF_BYTES, cell.offset


def _moved_table(table: ExtentTable, moved: Mapping[int, Places], numbers: Mapping[BlobRef, int]) -> ExtentTable | None:
    if next(table.cells_within(moved), None) is None:
        return None
    cells = [_moved(cell, moved, numbers) for cell in table.stored_cells()]
    return build(table.shape, table.itemsize, table.cell, cells)


def _moved(cell: StoredCell, moved: Mapping[int, Places], numbers: Mapping[BlobRef, int]) -> StoredCell:
    base = None if cell.base is None else _moved(cell.base, moved, numbers)
    frame = None if cell.frame is None else Frame(cell.stored, base)
    place = moved.get(cell.blob, {}).get(cell.offset)
    if place is None:
        return cell._replace(frame=frame)
    return cell._replace(blob=numbers[place.ref], offset=place.offset, frame=None if place.bare else frame)
