"""The bytes of a store: how many it holds, what each run uses, alone or not, and what nothing uses any more."""

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
from casckpt.upkeep.copies.mirror_notes import NO_STORE, mirror_made_at, needed_in_mirror, unmirrored
from casckpt.upkeep.gc.purge import plan_of
from casckpt.upkeep.inventory import BLOB, Inventory, list_unguarded

_Blob = tuple[TxId, BlobHash]


@dataclass(frozen=True, slots=True)
class RunUsage:
    """One run. Bytes are those of blob files, except ``bytes_logical``: of the tensors that each checkpoint holds.

    ``bytes_used``: of all blobs that its live checkpoints name; ``bytes_alone``: of those that no other run names: so
    much a gc would free if the run were given up; ``bytes_newest``: of those that its newest checkpoint names.
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
    """All runs, those that use most first. ``bytes_unneeded``: of blobs that no live checkpoint names.

    These are leftovers of failed saves, blobs of saves that run now, and what was purged. ``freed``: what a gc deletes
    of these and of what only forgotten checkpoints need. ``unreadable``: ids of checkpoints that could not be looked
    at; what they use counts as unneeded here, though gc knows better.
    """

    runs: Sequence[RunUsage]
    bytes_blobs: int
    bytes_shared: int
    bytes_unneeded: int
    freed: Freed
    unreadable: Sequence[str]


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes of blobs that a gc without rules deletes ``now``, and ``later``: when all that is forgotten was purged."""

    now: int
    later: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and bytes of a store.

    ``bytes_stored``: of all its objects. ``bytes_logical``: of the tensors of all visible checkpoints, each counted
    in full, but for what was thinned away; ``bytes_coded``: of that, what is stored as frames; ``bytes_frames``: what
    these take; ``bytes_deltas``: of that, what only tells how other cells changed. ``forgotten``: checkpoints that
    wait to be purged. ``bytes_freed_now``, ``bytes_freed_later``: what a gc without a rule deletes, and what it
    deletes when all that is forgotten now cannot be restored any more. ``mirror``: URL of the store's mirror, None if
    it has none; ``mirror_found``: whether a store is there, None where nobody can tell; ``mirrored``, ``unmirrored``:
    checkpoints, forgotten ones too, that are noted as safe there, and those that are not yet. ``damaged_blobs``: that
    are marked, and that checkpoints need.
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
    """Count. Lists, and reads, what the catalogue does not know. Raises NotFound, StorageError."""
    commits = list_commits(repo)
    live = commits.live()
    use, stock = BlobUse(repo, live), list_unguarded(repo, commits)
    loose, by_run = _loose_blobs(stock), grouped(live, lambda commit: commit.run)
    runs = [_usage_of(run, of_run, use) for run, of_run in by_run.items()]
    used = [use.used(one.txid for one in of_run)[0].tolist() for of_run in by_run.values()]
    shared = (use.refs[number] for number, runs_of in Counter(chain(*used)).items() if runs_of > 1)
    return StoreUsage(
        runs=sorted(runs, key=lambda one: (-one.bytes_used, one.run)),
        bytes_blobs=stock.total().blob_bytes,
        bytes_shared=sum(
            size if uploader in stock.guarded else loose.get((uploader, blob), 0) for uploader, blob, size in shared
        ),
        freed=freed_by_gc(repo, commits, stock),
        bytes_unneeded=sum(size for blob, size in loose.items() if blob not in use.named),
        unreadable=[commit.id for commit in live if commit.txid not in use.blobs],
    )


def measure(repo: Repository) -> StoreStats:
    """Count. Lists, and reads, what the catalogue does not know; asks for the mirror. Raises `StorageError`."""
    commits, mirror = list_commits(repo), repo.settings.mirror
    current, stock = commits.current(), list_unguarded(repo, commits)
    made = None if mirror is None else mirror_made_at(repo, mirror)
    is_there = None if made is None else made != NO_STORE
    found, freed = stock.total(), freed_by_gc(repo, commits, stock, purges=is_there is not False)
    needed = [] if mirror is None else needed_in_mirror(repo)
    behind = len(unmirrored(repo, needed, mirror, made if made and is_there else 0))
    return StoreStats(
        checkpoints=len(current),
        forgotten=sum(commit.is_forgotten for commit in commits.live()),
        runs=len({commit.run for commit in current}),
        blobs=found.blobs,
        bytes_stored=found.blob_bytes + found.manifest_bytes,
        bytes_blobs=found.blob_bytes,
        bytes_manifests=found.manifest_bytes,
        bytes_logical=sum(commit.bytes_held for commit in current),
        bytes_coded=sum(commit.committed.bytes_coded for commit in current),
        bytes_frames=sum(commit.committed.bytes_frames for commit in current),
        bytes_deltas=sum(commit.committed.bytes_deltas for commit in current),
        bytes_freed_now=freed.now,
        bytes_freed_later=freed.later,
        mirror=mirror,
        mirror_found=is_there,
        mirrored=len(needed) - behind,
        unmirrored=behind,
        damaged_blobs=_damaged_blobs(repo, commits),
    )


def _damaged_blobs(repo: Repository, commits: CommitList) -> int:
    """Count the blobs that are marked; without those that nothing needs any more, which wait for a gc."""
    marked = blobs.damaged_marks(repo)
    return len(marked & BlobUse(repo, commits.needed()).named) if marked else 0


def freed_by_gc(repo: Repository, commits: CommitList, stock: Inventory | None = None, *, purges: bool = True) -> Freed:
    """Count what gcs without rules would free. Without ``stock`` the leftovers of saves that failed do not count.

    ``purges``: False where the mirror is gone, and the next one keeps all. Reads manifests only where something is
    forgotten, or lies about. Raises `StorageError`.
    """
    forgotten = [commit for commit in commits.live() if not commit.visible]
    loose = {} if stock is None else _loose_blobs(stock)
    use = BlobUse(repo, commits.live() if forgotten or loose else ())
    purged = plan_of(repo, commits, Policy()).purge if forgotten and purges else ()
    due = use.alone(commit.txid for commit in purged).blob_bytes
    return Freed(
        now=due + sum(size for blob, size in loose.items() if blob not in use.named),
        later=use.alone(commit.txid for commit in forgotten).blob_bytes - due,
    )


def _loose_blobs(stock: Inventory) -> dict[_Blob, int]:
    """Return those that are not guarded by a live checkpoint, which names them all."""
    found = {}
    for key, size in stock.sizes.items():
        name = parse_object(key)
        if name is not None and name.kind == BLOB:
            found[name.uploader, BlobHash(name.hash)] = size
    return found


def _usage_of(run: str, commits: Sequence[Commit], use: BlobUse) -> RunUsage:
    mine, newest = [commit.txid for commit in commits], commits[-1]
    readable = [txid for txid in mine if txid in use.blobs]
    return RunUsage(
        run=run,
        checkpoints=sum(commit.visible for commit in commits),
        forgotten=sum(commit.is_forgotten for commit in commits),
        newest_step=newest.step,
        newest_at=newest.committed.created_at,
        bytes_logical=sum(commit.bytes_held for commit in commits if commit.visible),
        bytes_used=int(use.sizes[use.used(mine)[0]].sum()),
        bytes_alone=use.alone(mine).blob_bytes,
        bytes_newest=int(use.sizes[use.used(readable[-1:])[0]].sum()),
    )
