"""Checkpoints that lost a blob are rewritten: the live cells that it held lie in new blobs, and the id stays.

It is an ordinary save, by the same protocol: the transaction begins, then commits are listed, and what is reused is
what a live checkpoint of that listing names. So of several that shared a lost blob the first makes a new one, with what
all of them need of it, and the others name that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from casckpt.format.blob import order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded
from casckpt.format.draft import Encoded, placed
from casckpt.format.extents import ExtentTable, build
from casckpt.format.keys import uploader_folder
from casckpt.format.manifest import Manifest
from casckpt.format.names import TxId
from casckpt.format.records import Committed, changed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.format.sections.index import StreamEntry
from casckpt.repository import blobs, manifests
from casckpt.repository.commits import Commit, CommitList
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.mending import Mending, Source
from casckpt.upkeep.repair.salvage import LiveCell, live_cells
from casckpt.upkeep.rewriting import rewrite

Offsets = dict[int, int]
"""New offset of each cell of a blob, by the old one."""


@dataclass(frozen=True)
class Relocation:
    """Rewrites checkpoints of ``repo``. ``live``: the cells that they need, by lost blob; they come from ``source``."""

    repo: Repository
    live: Mapping[BlobRef, Collection[LiveCell]]
    source: Source
    _made: dict[BlobRef, tuple[BlobRef, Offsets]] = field(default_factory=dict)

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
        moved: dict[int, Offsets] = {}
        for index, ref in wanted.items():
            new = self._replacement(txid, listed, ref, needed[ref])
            if new is None:
                return None
            refs[index], moved[index] = new
        self.repo.storage.settle(uploader_folder(txid))
        tables = {entry.number: made for entry in manifest.held if (made := _moved_table(manifest, entry, moved))}
        return record_of(self.repo, txid, commit, placed(manifest, encode_blobs(refs), tables))

    def _replacement(
        self, txid: TxId, listed: CommitList, ref: BlobRef, needed: Set[LiveCell]
    ) -> tuple[BlobRef, Offsets] | None:
        """Return a new blob for ``ref``, and where cells lie in it; None if some of ``needed`` are missing.

        It is one that another rewrite has made, if that lives; else it is put.
        """
        made = self._made.get(ref)
        user = None if made is None else listed.commits.get(made[0].uploader)
        if made is None or user is None or not user.live:
            found = self.source.mend(self.repo, ref, self.live[ref])
            if not needed or not found.missing.isdisjoint(needed):  # of nothing no blob can be made
                return None
            made = self._made[ref] = _upload(self.repo, txid, found)
        return made if {cell.offset for cell in needed} <= made[1].keys() else None


def record_of(repo: Repository, txid: TxId, commit: Commit, made: Encoded) -> Committed:
    """Put a manifest, and return the record of a rewrite of ``commit`` that has it. Raises `StorageError`."""
    manifests.put_encoded(repo, txid, made)
    places = {"txid": txid, "head": made.head, "manifest_bytes": len(made.data)}
    return changed(commit.committed, time=repo.clock(), **places)


def _upload(repo: Repository, txid: TxId, found: Mending) -> tuple[BlobRef, Offsets]:
    """Upload a new blob of what there is of the live cells of a damaged one; return it, and their places."""
    unique = {cell.offset: cell for cell in found.cells if cell not in found.missing}  # the longest, which comes last
    buffer = memoryview(bytearray(buffer_bytes(padded(sum(cell.nbytes for cell in unique.values())))))
    writer, moved = BlobWriter(buffer), Offsets()
    for cell in sorted(unique.values(), key=lambda cell: (order(cell.dtype), cell.nbytes < LEAF_BYTES, cell.offset)):
        at = writer.place(cell.nbytes)
        moved[cell.offset] = at
        buffer[at : at + cell.nbytes] = found.part(cell.offset, cell.nbytes)
        writer.add(cell.dtype, cell.nbytes, cell.digest)
    name, size = writer.finish()
    blobs.put(repo, txid, name, buffer[:size])
    return BlobRef(name, size, txid), moved


def _moved_table(manifest: Manifest, entry: StreamEntry, moved: Mapping[int, Offsets]) -> ExtentTable | None:
    table = manifest.extents(entry)
    cells = list(table.stored_cells())
    if not any(cell.blob in moved for cell in cells):
        return None
    new = [cell._replace(offset=moved.get(cell.blob, {}).get(cell.offset, cell.offset)) for cell in cells]
    return build(table.shape, table.itemsize, table.cell, new)
