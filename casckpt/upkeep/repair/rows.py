"""Rows of manifests against the proofs of blobs: does a checkpoint name the cells that lie where it says?

What is compared are cells that are leaves; those that are coded are not (`casckpt.upkeep.repair.frames`). A manifest
whose rows are wrong has a hash that is right, so nothing else would notice before a load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, Gone, NotFound, Refused, StorageError
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, TxId
from casckpt.format.proof import Leaf, as_leaves
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit
from casckpt.repository.fetching import holds_cell
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.blob_check import Checked

_AT_ONCE = 64  # blobs whose leaves are held


def wrong_rows(
    repo: Repository, commits: Iterable[Commit], right: Sequence[Checked]
) -> Iterator[tuple[Commit, CasckptError]]:
    """Yield those of ``commits`` that name other cells than lie in ``right``, blobs that were proved."""
    proofs = {(one.ref.uploader, one.ref.hash): one.proof for one in right}
    for commit in commits if proofs else ():
        try:
            _compare(repo, manifests.get(repo, commit), proofs)
        except (Damaged, Gone):
            continue  # of a manifest that is damaged others tell
        except Refused as error:
            yield commit, error


def _compare(repo: Repository, manifest: Manifest, proofs: Mapping[tuple[TxId, BlobHash], bytes]) -> None:
    refs = list(manifest.blobs)
    leaves_of = lru_cache(_AT_ONCE)(partial(_leaves, refs, proofs))
    manifest.ready(objects=())
    for entry in manifest.held:
        if entry.nbytes < LEAF_BYTES:
            continue
        for cell in (link for one in manifest.extents(entry).stored_cells() for link in one.chain):
            if cell.frame or cell.nbytes < LEAF_BYTES or not (leaves := leaves_of(cell.blob)):
                continue
            if not _holds(repo, refs[cell.blob], cell, leaves.get(cell.offset)):
                where = f"bytes {cell.offset} to {cell.offset + cell.nbytes} of blob {refs[cell.blob].hash}"
                raise Refused(f"key {entry.key!r}: {where} are right, but not what it says that lies there")


def _leaves(refs: Sequence[BlobRef], proofs: Mapping[tuple[TxId, BlobHash], bytes], number: int) -> dict[int, Leaf]:
    """Return the leaves of a blob by their offset; none where it was not looked at, or is damaged."""
    return {leaf.offset: leaf for leaf in as_leaves(proofs.get((refs[number].uploader, refs[number].hash), b""))}


def _holds(repo: Repository, ref: BlobRef, cell: StoredCell, leaf: Leaf | None) -> bool:
    if leaf is not None and leaf.nbytes == cell.nbytes:
        return leaf.digest == cell.digest
    try:  # cut by another writer
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            return holds_cell(reader, cell.offset, memoryview(bytearray(cell.nbytes)), cell.digest)
    except (NotFound, StorageError):
        return True  # it was purged just now
