"""What holds the bytes of a store: its runs and checkpoints, and what gc would free.

The catalogue lists each checkpoint's blobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain

from casckpt.base.groups import grouped
from casckpt.base.lazy import cached_property
from casckpt.base.names import is_among
from casckpt.base.units import time_of
from casckpt.format.keys import parse_object, parse_txid
from casckpt.format.names import BlobHash, TxId
from casckpt.history.commits import Commit, CommitList
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.purge import GcPlan, plan_of
from casckpt.upkeep.inventory import BLOB, BlobUse, Inventory, list_unguarded

_DAY = 86400 * 1_000_000  # microseconds
_MOST_DAYS = 36500
_SILENT = 3  # intervals without a save, after which a run counts as ended


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The counts and sizes of a store's contents.

    ``bytes_stored``: all objects. ``bytes_logical``: the tensors of all visible checkpoints. Shared tensors count once
    for each checkpoint, and dropped tensors do not count. ``bytes_coded``: the part of ``bytes_logical`` that is
    stored as frames. ``bytes_frames``: the size of these frames. ``bytes_deltas``: the size of the frames that have a
    base. ``forgotten``: checkpoints that are waiting to be purged. ``bytes_freed_now``: blobs that gc without rules
    deletes. ``bytes_freed_later``: blobs that gc deletes after all currently forgotten checkpoints have been purged.
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


@dataclass(frozen=True, slots=True)
class Freed:
    """How many bytes a gc without rules frees ``now``, and ``later``, once all forgotten checkpoints are purged."""

    now: int
    later: int


@dataclass(frozen=True, slots=True)
class RunUsage:
    """The space that one run uses. Sizes count blob files, except ``bytes_logical``, which counts visible tensors.

    ``bytes_used``: all blobs that its live checkpoints name. ``bytes_alone``: the blobs that no other run names, which
    gc frees if the run is purged.
    """

    run: str
    checkpoints: int
    forgotten: int
    newest_step: int
    newest_at: int
    bytes_logical: int
    bytes_used: int
    bytes_alone: int


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
class Forecast:
    """When the disk is full if training goes on as it did.

    ``bytes_per_day``: how much the checkpoints that remain have added per day, in runs that still save. ``bytes_free``:
    None if the storage does not know, as in a bucket. ``full_at``: None if nothing grows, or in more than 100 years.
    """

    bytes_per_day: int
    bytes_free: int | None
    full_at: datetime | None


class Sizes:
    """What holds the bytes of a store, as of one listing. Each method computes one part of the answer.

    The parts share an index of the blobs, a list of the objects, and a plan of gc. Each of these is made when a part
    first needs it. The methods read the manifests that the catalogue lacks, and raise `StorageError`.
    """

    def __init__(self, repo: Repository, commits: CommitList) -> None:
        self._repo, self._commits, self._live = repo, commits, commits.placed()
        self._gone = [commit for commit in self._live if not commit.visible]

    def stats(self) -> StoreStats:
        """Return the counts of the store."""
        commits, current = self._commits, self._commits.current()
        total, freed = self._stock.total(), self.freed()
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
        )

    def freed(self) -> Freed:
        """Return how many bytes gc without rules would free.

        Reads manifests only if there are forgotten checkpoints or blobs without a guard, and asks the mirror only about
        checkpoints that gc would purge.
        """
        unneeded = self._unneeded()
        if not self._gone:
            return Freed(unneeded, 0)
        due = self._use.alone(self._plan.purge).blob_bytes
        return Freed(due + unneeded, self._use.alone(self._gone).blob_bytes - due)

    def usage(self) -> StoreUsage:
        """Return how much space each run uses."""
        use, guarded = self._use, self._stock.guarded
        by_run = grouped(self._live, lambda commit: commit.run).values()
        named = Counter(chain(*(use.used(of_run)[0].tolist() for of_run in by_run)))
        shared = (use.refs[number] for number, runs in named.items() if runs > 1)
        return StoreUsage(
            runs=sorted(map(self._run, by_run), key=lambda usage: (-usage.bytes_used, usage.run)),
            bytes_blobs=self._stock.total().blob_bytes,
            bytes_shared=sum(
                size if uploader in guarded else self._loose.get((uploader, blob), 0) for uploader, blob, size in shared
            ),
            bytes_unneeded=self._unneeded(),
            freed=self.freed(),
            unreadable=self.unreadable(),
        )

    def forecast(self, run: str | None = None) -> Forecast:
        """Return when the disk is full, from the growth of all runs, or only of ``run``, a name or pattern."""
        now, free = self._repo.clock(), self._repo.storage.bytes_free()
        runs = grouped(self._commits.current(), lambda commit: commit.run)
        per_day = sum(self._per_day(of_run, now) for name, of_run in runs.items() if is_among(name, run))
        days = free / per_day if per_day and free is not None else _MOST_DAYS
        full_at = time_of(now + int(days * _DAY)) if days < _MOST_DAYS else None
        return Forecast(int(per_day), free, full_at)

    def _per_day(self, of_run: Sequence[Commit], now: int) -> float:
        """Return the daily growth of a run, oldest commit first. 0 if it has not saved for long, or only once.

        Removed checkpoints count as saves that added nothing, as long as their records exist. So does the first save,
        which could reuse nothing.
        """
        code = parse_txid(of_run[-1].txid).run_hash
        saves = [name.time for txid in self._commits.recorded if (name := parse_txid(txid)).run_hash == code]
        first, last = min(saves), max(saves)
        span, silence = (last - first) / timedelta(days=1), (time_of(now) - last) / timedelta(days=1)
        if not span or silence > max(1, _SILENT * span / (len(saves) - 1)):
            return 0
        return sum(one.committed.bytes_written for one in of_run if one.committed.parent is not None) / span

    def unreadable(self) -> list[str]:
        """Return the ids of the checkpoints whose manifest cannot be read."""
        return [commit.id for commit in self._live if commit.places.txid not in self._use.blobs]

    @cached_property
    def _use(self) -> BlobUse:
        return BlobUse(self._repo, self._live)

    @cached_property
    def _stock(self) -> Inventory:
        return list_unguarded(self._repo, self._commits)

    @cached_property
    def _plan(self) -> GcPlan:
        return plan_of(self._repo, self._commits, Policy())

    @cached_property
    def _loose(self) -> dict[tuple[TxId, BlobHash], int]:
        """The sizes of the blobs without a guard."""
        names = ((parse_object(key), size) for key, size in self._stock.sizes.items())
        return {(name.uploader, BlobHash(name.hash)): size for name, size in names if name and name.kind == BLOB}

    def _unneeded(self) -> int:
        """Return the size of the blobs that no live checkpoint names."""
        return sum(size for blob, size in self._loose.items() if blob not in self._use.named)

    def _run(self, commits: Sequence[Commit]) -> RunUsage:
        return RunUsage(
            run=commits[-1].run,
            checkpoints=sum(commit.visible for commit in commits),
            forgotten=sum(commit.is_forgotten for commit in commits),
            newest_step=commits[-1].step,
            newest_at=commits[-1].committed.created_at,
            bytes_logical=sum(commit.bytes_held for commit in commits if commit.visible),
            bytes_used=int(self._use.sizes[self._use.used(commits)[0]].sum()),
            bytes_alone=self._use.alone(commits).blob_bytes,
        )
