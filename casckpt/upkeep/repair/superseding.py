"""Successors of checkpoints that lost a blob: committed anew, the live cells in new blobs; the old ones are forgotten.

It is an ordinary save, by the same protocol: the transaction begins, then commits are listed, and what is reused is
what a live checkpoint of that listing names. Its id sorts right behind that of the old one, so that what is the latest
of a run stays it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from casckpt.errors import Conflict
from casckpt.format.blob import order
from casckpt.format.blob_writer import LEAF_BYTES, BlobWriter, buffer_bytes, padded
from casckpt.format.draft import Encoded, placed
from casckpt.format.extents import ExtentTable, build
from casckpt.format.keys import make_txid, parse_txid, transaction_key, uploader_folder
from casckpt.format.manifest import Manifest
from casckpt.format.names import TxId
from casckpt.format.records import Began, Committed, changed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.format.sections.index import StreamEntry
from casckpt.repository import blobs, commits, manifests
from casckpt.repository.commits import Commit, CommitList, list_commits
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
    return commit_behind(repo, commit, lambda txid, _: _save(repo, txid, commit, lost, source))


def commit_behind(
    repo: Repository, commit: Commit, save: Callable[[TxId, CommitList], Committed | None]
) -> Commit | None:
    """Commit what ``save`` puts for a transaction, which began before the commits that it is told were listed.

    None if it puts nothing. Tags go along, and ``commit`` is forgotten. Raises what `supersede` does.
    """
    transaction = _begin_behind(repo, commit)
    try:
        listed = list_commits(repo)
        if commit.txid not in {current.txid for current in listed.current()}:
            raise Conflict(f"{commit} is not visible any more, or a later twin is: there is nothing to repair")
        new = save(transaction.txid, listed)
        if new is None:
            transaction.abort("bytes that are damaged cannot be had again")
            return None
        made = transaction.commit(new)
    except BaseException as error:
        transaction.abort(f"repair failed: {error}")
        raise
    lasting = {name: tag for name, tag in tags(repo).items() if tag.expires is None}
    for name in tags_of(lasting, commit.id):
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
    """Put a manifest, and return the record that makes it a twin of ``commit``. Raises `StorageError`."""
    manifests.put_encoded(repo, txid, made)
    places = {"txid": txid, "uploader": txid, "head": made.head, "manifest_bytes": len(made.data)}
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
