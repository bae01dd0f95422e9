"""Fetches the blobs of a checkpoint into this host's cache before a load."""

from __future__ import annotations

from collections.abc import Sequence

from casckpt.base.progress import Progress
from casckpt.errors import Damaged
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, exists, gone
from casckpt.repository.fetching import BlobDamaged
from casckpt.repository.repository import Repository


def pre_download(repo: Repository, commit: Commit, refs: Sequence[BlobRef], *, threads: int, progress: Progress) -> int:
    """Fetch ``refs``, which ``commit`` needs, into this host's cache. Return the number of fetched bytes.

    ``progress``: called with the size of each blob once it is in the cache. Raises `Damaged`, or `Gone` if the
    checkpoint was purged in the meantime. Raises `InvalidInput` if the blobs exceed the cache's limit. Raises
    `StorageError`.
    """
    try:
        progress.expect(sum(ref.size for ref in refs))
        return repo.blob_cache.fill(repo.storage, refs, threads, progress)
    except BlobDamaged as error:
        if not exists(repo, commit):
            raise gone(commit, commit.id, "while it was being fetched") from error
        raise Damaged(
            f"blob {error.ref.hash} is damaged: {error}. Checkpoint {commit} needs it. Run `casckpt verify`, then "
            "`casckpt repair`, on the store",
            blob=error.ref.hash,
            checkpoints=(commit.id,),
        ) from error
