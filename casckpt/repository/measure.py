"""How much a store holds, and what it would take without sharing."""

from __future__ import annotations

from dataclasses import dataclass

from casckpt.repository.commits import list_commits
from casckpt.repository.mirrored import unmirrored
from casckpt.repository.repository import Repository
from casckpt.repository.stock import take_stock
from casckpt.repository.usage import freed_by_gc


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and bytes of a store.

    ``bytes_stored``: of all its objects. ``bytes_logical``: of the tensors of all visible checkpoints, each counted in
    full. ``forgotten``: checkpoints that wait to be purged. ``bytes_freed_now``, ``bytes_freed_later``: what a gc
    without a rule deletes, and what it deletes when all that is forgotten now cannot be restored any more. ``mirror``:
    URL of the store's mirror, None if it has none; ``unmirrored``: checkpoints, forgotten ones too, that are not safe
    there yet.
    """

    checkpoints: int
    forgotten: int
    runs: int
    blobs: int
    bytes_stored: int
    bytes_blobs: int
    bytes_manifests: int
    bytes_logical: int
    bytes_freed_now: int = 0
    bytes_freed_later: int = 0
    mirror: str | None = None
    unmirrored: int = 0


def measure(repo: Repository) -> StoreStats:
    """Count. Lists, and reads, what the catalogue does not know. Raises `StorageError`."""
    commits, mirror = list_commits(repo), repo.settings.mirror
    current = commits.current()
    stock = take_stock(repo, commits)
    found, freed = stock.total(), freed_by_gc(repo, commits, stock)
    return StoreStats(
        checkpoints=len(current),
        forgotten=sum(not commit.visible for commit in commits.live()),
        runs=len({commit.run for commit in current}),
        blobs=found.blobs,
        bytes_stored=found.blob_bytes + found.manifest_bytes,
        bytes_blobs=found.blob_bytes,
        bytes_manifests=found.manifest_bytes,
        bytes_logical=sum(commit.committed.bytes_total for commit in current),
        bytes_freed_now=freed.now,
        bytes_freed_later=freed.later,
        mirror=mirror,
        unmirrored=len(unmirrored(repo, commits.live(), mirror)),
    )
