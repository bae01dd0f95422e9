"""Rewrites of checkpoints that nothing is wrong with, and what comes after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from casckpt.format.draft import placed
from casckpt.format.keys import blob_key
from casckpt.format.names import TxId
from casckpt.format.records import Committed, changed
from casckpt.format.sections.blobs import encode_blobs
from casckpt.repository import blobs, manifests
from casckpt.repository.commits import Commit, CommitList
from casckpt.repository.repository import Repository
from casckpt.repository.rewriting import rewrite
from casckpt.upkeep.repair.relocating import record_of


def move(repo: Repository, base: Commit, **fields: Any) -> Commit:
    """Rewrite a checkpoint: the same blobs, under another uploader. ``fields``: of the record."""

    def save(txid: TxId, _: CommitList) -> Committed:
        manifest = manifests.get(repo, base)
        for ref in manifest.blobs:
            blobs.put(repo, txid, ref.hash, repo.storage.get(blob_key(ref.uploader, ref.hash), limit=ref.size))
        moved = encode_blobs(replace(ref, uploader=txid) for ref in manifest.blobs)
        return changed(record_of(repo, txid, base, placed(manifest, moved)), **fields)

    made = rewrite(repo, base, save)
    assert made is not None
    return made
