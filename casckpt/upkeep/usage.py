"""A store's bytes: the total, the bytes that each run uses, and the bytes that no checkpoint uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from casckpt.base.groups import grouped
from casckpt.contents import blobs
from casckpt.format.keys import parse_object
from casckpt.format.names import BlobHash, TxId
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.blob_use import BlobUse
from casckpt.upkeep.copies.mirrored import ask
from casckpt.upkeep.gc.purge import plan_of
from casckpt.upkeep.inventory import BLOB, Inventory, list_unguarded

_Blob = tuple[TxId, BlobHash]


@dataclass(frozen=True, slots=True)
class RunUsage:
    """The space that one run uses. Sizes count blob files, except ``bytes_logical``, which counts visible tensors.

    ``bytes_used``: all blobs that its live checkpoints name. ``bytes_alone``: the blobs that no other run names, which
    gc frees if the run is purged. ``bytes_newest``: the blobs that its newest checkpoint names.
    """

    run: str
    checkpoints: int
    forgotten: int
    newest_step: int
    newest_at: int
    bytes_logical: int
    bytes_used: int
    bytes_alone: int
    bytes_newest: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The space that each run uses, largest first. ``bytes_unneeded``: blobs that no live checkpoint names.

    Unneeded blobs are leftovers of failed saves, blobs of saves in progress, and blobs of purged checkpoints.
    ``freed``: the unneeded blobs that gc deletes, and the blobs that only forgotten checkpoints use. ``unreadable``:
    ids of checkpoints whose manifest cannot be read. Their blobs count as unneeded here, but gc does not delete them.
    """

    runs: Sequence[RunUsage]
    bytes_blobs: int
    bytes_shared: int
    bytes_unneeded: int
    freed: Freed
    unreadable: Sequence[str]


@dataclass(frozen=True, slots=True)
class Freed:
    """How many bytes a gc without rules frees ``now``, and ``later``, once all forgotten checkpoints are purged."""

    now: int
    later: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The counts and sizes of a store's contents.

    ``bytes_stored``: all objects. ``bytes_logical``: the tensors of all visible checkpoints. Shared tensors count once
    for each checkpoint, and dropped tensors do not count. ``bytes_coded``: the part of ``bytes_logical`` that is
    stored as frames. ``bytes_frames``: the size of these frames. ``bytes_deltas``: the size of the frames that have a
    base. ``forgotten``: checkpoints that are waiting to be purged. ``bytes_freed_now``: blobs that gc without rules
    deletes. ``bytes_freed_later``: blobs that gc deletes after all currently forgotten checkpoints have been purged.
    ``mirror``: URL of the store's mirror, or None if it has none. ``mirror_found``: whether a store exists at that
    URL, or None if it cannot be asked. ``mirrored``, ``unmirrored``: number of checkpoints, including forgotten ones,
    that are safe in the mirror, and of the others. ``damaged_blobs``: marked blobs that checkpoints need.
    """

    checkpoints: int
    forgotten: int
    runs: int
    blobs: int
    bytes_stored: int
    bytes_blobs: int
    bytes_manifests: int
    bytes_logical: int
    bytes_coded: int = 0
    bytes_frames: int = 0
    bytes_deltas: int = 0
    bytes_freed_now: int = 0
    bytes_freed_later: int = 0
    mirror: str | None = None
    mirror_found: bool | None = None
    mirrored: int = 0
    unmirrored: int = 0
    damaged_blobs: int = 0


def usage(repo: Repository) -> StoreUsage:
    """Return how much space each run uses. Reads the manifests that the catalogue lacks.

    Raises NotFound and StorageError.
    """
    commits = list_commits(repo)
    live = commits.placed()
    use, stock = BlobUse(repo, live), list_unguarded(repo, commits)
    loose, by_run = _loose_blobs(stock), grouped(live, lambda commit: commit.run)
    runs = [_usage_of(run, of_run, use) for run, of_run in by_run.items()]
    used = [use.used(of_run)[0].tolist() for of_run in by_run.values()]
    shared = (use.refs[number] for number, runs_of in Counter(chain(*used)).items() if runs_of > 1)
    return StoreUsage(
        runs=sorted(runs, key=lambda usage: (-usage.bytes_used, usage.run)),
        bytes_blobs=stock.total().blob_bytes,
        bytes_shared=sum(
            size if uploader in stock.guarded else loose.get((uploader, blob), 0) for uploader, blob, size in shared
        ),
        freed=freed_by_gc(repo, commits, stock),
        bytes_unneeded=sum(size for blob, size in loose.items() if blob not in use.named),
        unreadable=[commit.id for commit in live if commit.places.txid not in use.blobs],
    )


def measure(repo: Repository) -> StoreStats:
    """Return the counts of a store. Reads the manifests that the catalogue lacks, and lists the mirror's commits.

    Raises `StorageError`.
    """
    commits, mirror = list_commits(repo), repo.settings.mirror
    current, stock = commits.current(), list_unguarded(repo, commits)
    needed = [] if mirror is None else commits.live()
    answer = ask(repo, needed, many=True)
    total, freed = stock.total(), freed_by_gc(repo, commits, stock)
    marked = blobs.damaged_marks(repo)  # gc deletes the marked blobs that no checkpoint needs
    return StoreStats(
        checkpoints=len(current),
        forgotten=sum(commit.is_forgotten for commit in commits.live()),
        runs=len({commit.run for commit in current}),
        blobs=total.blobs,
        bytes_stored=total.blob_bytes + total.manifest_bytes,
        bytes_blobs=total.blob_bytes,
        bytes_manifests=total.manifest_bytes,
        bytes_logical=sum(commit.bytes_held for commit in current),
        bytes_coded=sum(commit.committed.bytes_coded for commit in current),
        bytes_frames=sum(commit.committed.bytes_frames for commit in current),
        bytes_deltas=sum(commit.committed.bytes_deltas for commit in current),
        bytes_freed_now=freed.now,
        bytes_freed_later=freed.later,
        mirror=mirror,
        mirror_found=answer.found,
        mirrored=len(needed) - len(answer.unsafe),
        unmirrored=len(answer.unsafe),
        damaged_blobs=len(marked & BlobUse(repo, commits.placed()).named) if marked else 0,
    )


def freed_by_gc(repo: Repository, commits: CommitList, stock: Inventory | None = None) -> Freed:
    """Return how many bytes gc without rules would free. Without ``stock``, leftovers of failed saves do not count.

    Reads manifests only if there are forgotten checkpoints or blobs without a guard, and asks the mirror only about
    checkpoints that gc would purge. Raises `StorageError`.
    """
    forgotten = [commit for commit in commits.placed() if not commit.visible]
    loose = {} if stock is None else _loose_blobs(stock)
    use = BlobUse(repo, commits.placed() if forgotten or loose else ())
    purged = plan_of(repo, commits, Policy()).purge if forgotten else ()
    due = use.alone(purged).blob_bytes
    return Freed(
        now=due + sum(size for blob, size in loose.items() if blob not in use.named),
        later=use.alone(forgotten).blob_bytes - due,
    )


def _loose_blobs(stock: Inventory) -> dict[_Blob, int]:
    """Return the sizes of the blobs without a guard."""
    names = ((parse_object(key), size) for key, size in stock.sizes.items())
    return {(name.uploader, BlobHash(name.hash)): size for name, size in names if name and name.kind == BLOB}


def _usage_of(run: str, commits: Sequence[Commit], use: BlobUse) -> RunUsage:
    newest = commits[-1]
    readable = [commit for commit in commits if commit.places.txid in use.blobs]
    return RunUsage(
        run=run,
        checkpoints=sum(commit.visible for commit in commits),
        forgotten=sum(commit.is_forgotten for commit in commits),
        newest_step=newest.step,
        newest_at=newest.committed.created_at,
        bytes_logical=sum(commit.bytes_held for commit in commits if commit.visible),
        bytes_used=int(use.sizes[use.used(commits)[0]].sum()),
        bytes_alone=use.alone(commits).blob_bytes,
        bytes_newest=int(use.sizes[use.used(readable[-1:])[0]].sum()),
    )
