"""Checkpoints to damage and repair, without tensors, and their damage."""

from __future__ import annotations

from casckpt.contents import blobs, manifests
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.keys import blob_key
from casckpt.format.manifest import placed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.history import commits
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.repair.verify import verify
from tests.support.checkpoints import Arrays, array, flip
from tests.support.repositories import committed_encoded

STATE: Arrays = {"a": array(1, 3), "b": array(2, dtype="int64"), "c": array(3, 0.5, dtype="uint8")}
KINDS = ["flipped", "header", "short", "gone"]
"""The kinds of `damage`."""


def copy_into(other: Repository, repo: Repository, commit: Commit) -> None:
    """Copy the checkpoint into a different store, with a new uploader."""
    manifest = manifests.get(repo, commit)
    txid = other.new_txid(commit.run, commit.step)
    refs = []
    for ref in manifest.blobs:
        data = repo.storage.get(blob_key(ref.uploader, ref.hash), limit=ref.size)
        blobs.put(other, txid, ref.hash, data)
        refs.append(BlobRef(ref.hash, ref.size, txid))
    made = manifests.put_encoded(other, txid, placed(manifest, encode_blobs(refs)))
    assert made.id == commit.id
    created = commit.committed.created_at
    commits.commit(other, committed_encoded(other, txid, made, commit.run, commit.step, created_at=created))


def damage(repo: Repository, key: str, how: str) -> None:
    """Damage a blob, and let verify find it."""
    if how == "flipped":
        flip(repo, key, DATA_OFFSET + 17)
    elif how == "header":
        flip(repo, key, 20)
    elif how == "short":
        repo.storage.replace(key, repo.storage.get(key, limit=1 << 30)[: DATA_OFFSET + 100])
    else:
        repo.storage.delete(key)
    verify(repo)
