"""How much a store holds, and what it would take without sharing."""

from __future__ import annotations

from dataclasses import dataclass

from casckpt.format.keys import parse_object
from casckpt.repository.commits import list_commits
from casckpt.repository.mirrored import unmirrored
from casckpt.repository.repository import Repository


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and bytes of a store.

    ``bytes_stored``: of all its objects. ``bytes_logical``: of the tensors of all visible checkpoints, each counted in
    full. ``forgotten``: checkpoints that wait to be purged. ``mirror``: URL of the store's mirror, None if it has none;
    ``unmirrored``: checkpoints, forgotten ones too, that are not safe there yet.
    """

    checkpoints: int
    forgotten: int
    runs: int
    blobs: int
    bytes_stored: int
    bytes_blobs: int
    bytes_manifests: int
    bytes_logical: int
    mirror: str | None = None
    unmirrored: int = 0


def measure(repo: Repository) -> StoreStats:
    """Count. Lists the store once; reads what the catalogue does not know."""
    commits, mirror = list_commits(repo), repo.settings.mirror
    current = commits.current()
    sizes = {"safetensors": [0, 0], "manifest": [0, 0]}
    for entry in repo.storage.list("objects/"):
        name = parse_object(entry.key)
        if name is not None:
            sizes[name.kind][0] += 1
            sizes[name.kind][1] += entry.size
    return StoreStats(
        checkpoints=len(current),
        forgotten=sum(not commit.visible for commit in commits.live()),
        runs=len({commit.run for commit in current}),
        blobs=sizes["safetensors"][0],
        bytes_stored=sizes["safetensors"][1] + sizes["manifest"][1],
        bytes_blobs=sizes["safetensors"][1],
        bytes_manifests=sizes["manifest"][1],
        bytes_logical=sum(commit.committed.bytes_total for commit in current),
        mirror=mirror,
        unmirrored=len(unmirrored(repo, commits.live(), mirror)),
    )
