"""The bytes of a store: how many it holds, what each run uses, alone or not, and what nothing uses any more."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from casckpt.errors import Damaged, Refused
from casckpt.format.keys import parse_object
from casckpt.format.names import BlobHash, TxId
from casckpt.plan.retention import Policy
from casckpt.repository import blobs, manifests
from casckpt.repository.commits import Commit, CommitList, list_commits
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.mirrored import NO_STORE, mirror_made_at, needed_in_mirror, unmirrored
from casckpt.upkeep.gc.retiring import min_age_of, plan_retiring
from casckpt.upkeep.stock import BLOB, Stock, Sums, take_stock

_Blob = tuple[TxId, BlobHash]
_SEVERAL = -1


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


@dataclass
class _Tally:
    """What was counted of one run."""

    number: int
    commits: list[Commit] = field(default_factory=list)
    blobs: dict[_Blob, int] = field(default_factory=dict)
    newest: int = 0


def usage(repo: Repository) -> StoreUsage:
    """Count. Lists, and reads, what the catalogue does not know. Raises NotFound, StorageError."""
    commits = list_commits(repo)
    live = commits.live()
    readable = {commit.txid for commit in manifests.learn(repo, live)}
    tallies, user = _tallied(repo, live, readable)
    stock = take_stock(repo, commits)
    loose = _loose_blobs(stock)
    runs = [_usage_of(run, tally, user) for run, tally in tallies.items()]
    return StoreUsage(
        runs=sorted(runs, key=lambda one: (-one.bytes_used, one.run)),
        bytes_blobs=stock.total().blob_bytes,
        bytes_shared=sum(
            size if blob[0] in stock.guarded else loose.get(blob, 0)
            for blob, size in _named(tallies.values()).items()
            if user[blob] == _SEVERAL
        ),
        freed=freed_by_gc(repo, commits, stock),
        bytes_unneeded=sum(size for blob, size in loose.items() if blob not in user),
        unreadable=[commit.id for commit in live if commit.txid not in readable],
    )


def measure(repo: Repository) -> StoreStats:
    """Count. Lists, and reads, what the catalogue does not know; asks for the mirror. Raises `StorageError`."""
    commits, mirror = list_commits(repo), repo.settings.mirror
    current, stock = commits.current(), take_stock(repo, commits)
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
    return len(marked & _named_by(repo, commits.needed()).keys()) if marked else 0


def _tallied(
    repo: Repository, live: Iterable[Commit], readable: Container[TxId]
) -> tuple[dict[str, _Tally], dict[_Blob, int]]:
    """Count each run; and tell of each blob the number of the run that names it, or ``_SEVERAL``. The oldest first."""
    tallies: dict[str, _Tally] = {}
    user: dict[_Blob, int] = {}
    for commit in live:
        tally = tallies.setdefault(commit.run, _Tally(len(tallies)))
        tally.commits.append(commit)
        if commit.txid in readable:
            found = {(uploader, name): size for uploader, name, size in manifests.blobs_of(repo, commit)}
            tally.blobs |= found
            tally.newest = sum(found.values())
            for blob in found:
                if user.setdefault(blob, tally.number) != tally.number:
                    user[blob] = _SEVERAL
    return tallies, user


def freed_by_gc(repo: Repository, commits: CommitList, stock: Stock | None = None, *, purges: bool = True) -> Freed:
    """Count what gcs without rules would free. Without ``stock`` the leftovers of saves that failed do not count.

    ``purges``: False where the mirror is gone, and the next one keeps all. Reads manifests only where something is
    forgotten, or lies about. Raises `StorageError`.
    """
    forgotten = [commit for commit in commits.live() if not commit.visible]
    due = needed_only_by(repo, commits, _due(repo, commits) if forgotten and purges else ())
    loose = {} if stock is None else _loose_blobs(stock)
    named = _named_by(repo, commits.live()) if loose else {}
    return Freed(
        now=due.blob_bytes + sum(size for blob, size in loose.items() if blob not in named),
        later=needed_only_by(repo, commits, forgotten).blob_bytes - due.blob_bytes,
    )


def _due(repo: Repository, commits: CommitList) -> Sequence[Commit]:
    """Return what the next gc purges; nothing where it would refuse to work."""
    try:
        return plan_retiring(repo, commits, Policy(), min_age_of(repo, None), None).purge
    except (Damaged, Refused):
        return ()


def needed_only_by(repo: Repository, commits: CommitList, some: Iterable[Commit]) -> Sums:
    """Sum up blobs that only ``some`` live ones of ``commits`` name: what a gc frees once those are purged.

    Checkpoints whose manifests cannot be read count for nothing. Raises `StorageError`.
    """
    gone = {commit.txid for commit in some}
    if not gone:
        return Sums()
    named = _named_by(repo, [commit for commit in commits.live() if commit.txid in gone])
    others = _named_by(repo, [commit for commit in commits.live() if commit.txid not in gone])
    sizes = [size for blob, size in named.items() if blob not in others]
    return Sums(blobs=len(sizes), blob_bytes=sum(sizes))


def _named_by(repo: Repository, live: Iterable[Commit]) -> dict[_Blob, int]:
    """Return the sizes of all blobs that these name, as far as their manifests can be read."""
    return {
        (uploader, blob): size
        for commit in manifests.learn(repo, live)
        for uploader, blob, size in manifests.blobs_of(repo, commit)
    }


def _loose_blobs(stock: Stock) -> dict[_Blob, int]:
    """Return those that are not guarded by a live checkpoint, which names them all."""
    found = {}
    for key, size in stock.sizes.items():
        name = parse_object(key)
        if name is not None and name.kind == BLOB:
            found[name.uploader, BlobHash(name.hash)] = size
    return found


def _named(tallies: Iterable[_Tally]) -> dict[_Blob, int]:
    return {blob: size for tally in tallies for blob, size in tally.blobs.items()}


def _usage_of(run: str, tally: _Tally, user: dict[_Blob, int]) -> RunUsage:
    newest = tally.commits[-1]
    return RunUsage(
        run=run,
        checkpoints=sum(commit.visible for commit in tally.commits),
        forgotten=sum(commit.is_forgotten for commit in tally.commits),
        newest_step=newest.step,
        newest_at=newest.committed.created_at,
        bytes_logical=sum(commit.bytes_held for commit in tally.commits if commit.visible),
        bytes_used=sum(tally.blobs.values()),
        bytes_alone=sum(size for blob, size in tally.blobs.items() if user[blob] == tally.number),
        bytes_newest=tally.newest,
    )
