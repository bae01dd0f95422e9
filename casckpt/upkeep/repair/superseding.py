"""Successors of checkpoints that lost a blob: committed anew, the live cells in new blobs; the old ones are forgotten.

It is an ordinary save, by the same protocol: the transaction begins, then commits are listed, and what is reused is
what a live checkpoint of that listing names. Its id sorts right behind that of the old one, so that what is the latest
of a run stays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from casckpt.errors import Conflict
from casckpt.format.blob import order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded
from casckpt.format.extents import build
from casckpt.format.keys import make_txid, parse_txid, transaction_key, uploader_folder
from casckpt.format.manifest import BlobRef, Manifest, StreamEntry, packed_blobs, packed_entry
from casckpt.format.names import TxId
from casckpt.format.records import Began, Committed, changed
from casckpt.repository import blobs, commits, manifests
from casckpt.repository.commits import Commit, list_commits
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.repository.tags import set_tag, tags, tags_of
from casckpt.repository.transactions import Transaction
from casckpt.upkeep.repair.mending import Mending, Source
from casckpt.upkeep.repair.salvage import live_cells

Moved = dict[tuple[int, int], int]
"""New offset of each cell, by (number of the blob, old offset)."""


def supersede(repo: Repository, commit: Commit, lost: Sequence[BlobRef], source: Source) -> Commit | None:
    """Commit a twin of ``commit`` that needs none of ``lost``, and forget ``commit``; None if cells are missing.

    Raises `Conflict` if ``commit`` is not what its run and step name any more, `StorageError`.
    """
    transaction = _begin_behind(repo, commit)
    try:
        if commit.txid not in {current.txid for current in list_commits(repo).current()}:
            raise Conflict(f"{commit} is not visible any more, or a later twin is: there is nothing to repair")
        new = _save(repo, transaction.txid, commit, lost, source)
        if new is None:
            transaction.abort("cells of a damaged blob cannot be had again")
            return None
        made = transaction.commit(new)
    except BaseException as error:
        transaction.abort(f"repair failed: {error}")
        raise
    for name in tags_of(tags(repo), commit.txid):
        set_tag(repo, name, made)
    commits.forget(repo, commit)
    return made


def _begin_behind(repo: Repository, commit: Commit) -> Transaction:
    begun = parse_txid(commit.txid).time + timedelta(microseconds=1)
    txid = make_txid(begun, repo.entropy(8), commit.run, commit.step)
    began = Began(txid=txid, run=commit.run, step=commit.step, time=repo.clock(), process=this_process())
    repo.put_record(transaction_key(txid), began)
    return Transaction(repo, began)


def _save(repo: Repository, txid: TxId, commit: Commit, lost: Sequence[BlobRef], source: Source) -> Committed | None:
    """Upload the new blobs and the manifest; return the record to commit."""
    manifest = manifests.get(repo.fresh(), commit)  # it may have been put back meanwhile
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
    stored, places = packed_blobs(refs)
    entries = [_moved_entry(manifest, entry, moved) for entry in manifest.body.entries]
    id = manifests.put(repo, txid, changed(manifest.body, blobs=stored, entries=entries), places)
    return changed(commit.committed, txid=txid, uploader=txid, manifest=id, time=repo.clock())


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


def _moved_entry(manifest: Manifest, entry: StreamEntry, moved: Moved) -> StreamEntry:
    table = manifest.extents(entry)
    cells = list(table.stored_cells())
    if not any((cell.blob, cell.offset) in moved for cell in cells):
        return entry
    new = [cell._replace(offset=moved.get((cell.blob, cell.offset), cell.offset)) for cell in cells]
    made = build(table.shape, table.itemsize, table.cell, new)
    return packed_entry(entry.kind, entry.key, entry.dtype, made, index=entry.index, rank=entry.rank)
