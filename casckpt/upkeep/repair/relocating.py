"""Checkpoints that lost a blob are rewritten: the live cells that it held lie in new blobs, and the id stays.

It is an ordinary save, by the same protocol: the transaction begins, then commits are listed, and what is reused is
what a live checkpoint of that listing names.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from casckpt.repository.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.mending import Mending, Source
from casckpt.upkeep.repair.salvage import live_cells
from casckpt.upkeep.rewriting import rewrite

Moved = dict[tuple[int, int], int]
"""New offset of each cell, by (number of the blob, old offset)."""


def relocate(repo: Repository, commit: Commit, lost: Sequence[BlobRef], source: Source) -> Commit | None:
    """Rewrite ``commit`` so that it needs none of ``lost``; None if cells are missing.

    Raises `Conflict` if ``commit`` is not visible any more, or was changed by somebody else; `StorageError`.
    """
    return rewrite(repo, commit, lambda txid, _: _save(repo, txid, commit, lost, source))


def _save(repo: Repository, txid: TxId, commit: Commit, lost: Sequence[BlobRef], source: Source) -> Committed | None:
    """Upload the new blobs and the manifest; return the record to commit."""
    manifest = manifests.get(repo, commit)
    names = {(ref.uploader, ref.hash): ref for ref in lost}
    refs = list(manifest.blobs)
    wanted = {i: names[r.uploader, r.hash] for i, r in enumerate(refs) if (r.uploader, r.hash) in names}
    of_blob = live_cells(manifest, wanted)
    moved: Moved = {}
    for index, ref in wanted.items():
        found = source.mend(repo, ref, of_blob[ref])
        if found.missing:
            return None
        refs[index] = _upload(repo, txid, index, found, moved)
    repo.storage.settle(uploader_folder(txid))
    tables = {entry.number: made for entry in manifest.entries if (made := _moved_table(manifest, entry, moved))}
    return record_of(repo, txid, commit, placed(manifest, encode_blobs(refs), tables))


def record_of(repo: Repository, txid: TxId, commit: Commit, made: Encoded) -> Committed:
    """Put a manifest, and return the record of a rewrite of ``commit`` that has it. Raises `StorageError`."""
    manifests.put_encoded(repo, txid, made)
    places = {"txid": txid, "head": made.head, "manifest_bytes": len(made.data)}
    return changed(commit.committed, time=repo.clock(), **places)


def _upload(repo: Repository, txid: TxId, index: int, found: Mending, moved: Moved) -> BlobRef:
    """Upload a new blob of the live cells of a damaged one. Their places go into ``moved``."""
    unique = {cell.offset: cell for cell in found.cells}  # of several the longest, which comes last
    buffer = memoryview(bytearray(buffer_bytes(padded(sum(cell.nbytes for cell in unique.values())))))
    writer = BlobWriter(buffer)
    for cell in sorted(unique.values(), key=lambda cell: (order(cell.dtype), cell.nbytes < LEAF_BYTES, cell.offset)):
        at = writer.place(cell.nbytes)
        moved[index, cell.offset] = at
        buffer[at : at + cell.nbytes] = found.part(cell.offset, cell.nbytes)
        writer.add(cell.dtype, cell.nbytes, cell.digest)
    name, size = writer.finish()
    blobs.put(repo, txid, name, buffer[:size])
    return BlobRef(name, size, txid)


def _moved_table(manifest: Manifest, entry: StreamEntry, moved: Moved) -> ExtentTable | None:
    table = manifest.extents(entry)
    cells = list(table.stored_cells())
    if not any((cell.blob, cell.offset) in moved for cell in cells):
        return None
    new = [cell._replace(offset=moved.get((cell.blob, cell.offset), cell.offset)) for cell in cells]
    return build(table.shape, table.itemsize, table.cell, new)
