"""Rewrites of undamaged checkpoints, and later changes to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from casckpt.contents import blobs, manifests
from casckpt.format.extents import ExtentTable, build
from casckpt.format.keys import blob_key
from casckpt.format.manifest import placed
from casckpt.format.names import TxId
from casckpt.format.records import Rewritten, changed
from casckpt.format.sections.blobs import encode_blobs
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.upkeep.rewrite import rewrite, rewritten


def _renumbered(table: ExtentTable, count: int) -> ExtentTable:
    cells = [cell.moved(lambda one: (count - 1 - one.blob, one.offset)) for cell in table.stored_cells()]
    return build(table.shape, table.itemsize, table.cell, cells)


def move(repo: Repository, base: Commit, **fields: Any) -> Commit:
    """Rewrite a checkpoint into the same blobs of a different uploader, in reverse order. ``fields``: record fields."""

    def save(txid: TxId) -> Rewritten:
        manifest = manifests.get(repo, base)
        for ref in manifest.blobs:
            blobs.put(repo, txid, ref.hash, repo.storage.get(blob_key(ref.uploader, ref.hash), limit=ref.size))
        refs = [replace(ref, uploader=txid) for ref in manifest.blobs][::-1]
        tables = {entry.number: _renumbered(manifest.extents(entry), len(refs)) for entry in manifest.entries}
        return changed(rewritten(repo, txid, base, placed(manifest, encode_blobs(refs), tables)), **fields)

    return rewrite(repo, base, save)
