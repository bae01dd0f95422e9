"""What a store does with checkpoints as they are: find, keep, remove, check and copy them. Needs no torch."""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Self

from casckpt.checkpoint.handle import Checkpoint
from casckpt.errors import Conflict, InvalidInput, NotFound
from casckpt.plan.difference import Difference, difference
from casckpt.plan.durations import Duration, seconds_of
from casckpt.plan.notebook import html_table
from casckpt.plan.progress import Progress, Shown
from casckpt.plan.retention import Policy
from casckpt.plan.sizes import format_size
from casckpt.repository import commits as commit_log
from casckpt.repository import copying, manifests, refs, tags
from casckpt.repository.copying import CopyResult
from casckpt.repository.forgetting import forget, plan_forget
from casckpt.repository.gc import GcResult, Tell, execute, plan_gc, preview
from casckpt.repository.measure import StoreStats, measure
from casckpt.repository.mirror import Mirror
from casckpt.repository.mirrored import MirrorLag
from casckpt.repository.opening import open_repository
from casckpt.repository.repair import RepairResult, repair
from casckpt.repository.repository import Repository
from casckpt.repository.verify import Mode, VerifyResult, verify

if TYPE_CHECKING:
    from pathlib import Path

WAIT: Duration = "60s"  # of a gc for saves in progress
_SHOWN = 20  # checkpoints in a notebook

log = logging.getLogger(__name__)


class Archive:
    """The half of a `casckpt.Store` that knows no tensors; see there."""

    def __init__(self, repository: Repository, mirror: Repository | None = None) -> None:
        if not isinstance(repository, Repository):
            raise InvalidInput(f"a store is opened with casckpt.open({repository!r}), not made with casckpt.Store")
        self.repository = repository
        self._mirror = None
        if mirror is not None:
            repository.mirror = mirror.storage.url
            self._mirror = Mirror(repository, mirror)

    def __reduce__(self) -> tuple[type[Self], tuple[Repository, Repository | None]]:
        return type(self), (self.repository, None if self._mirror is None else self._mirror.target)

    def _mirrored(self) -> Self:
        """Itself, once the copies that wait go on in the background."""
        if self._mirror is not None:
            weakref.finalize(self, self._mirror.stop)
            self._mirror.wake()
        return self

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self.repository.storage.url

    def __repr__(self) -> str:
        return f"casckpt.open({self.url!r})"

    def _repr_html_(self) -> str:
        found = self.checkpoints() if self.repository.exists() else []
        rows = [
            (
                one.run, one.step, f"{one.created_at:%Y-%m-%d %H:%M} UTC", format_size(one.stats.bytes_total),
                format_size(one.stats.bytes_written), one.id[:12],
            )
            for one in found[-_SHOWN:]
        ]  # fmt: skip
        more = f", of which the last {_SHOWN}" if len(found) > _SHOWN else ""
        title = f"{self.url}: {len(found)} checkpoints{more}"
        return html_table(title, ("RUN", "STEP", "CREATED", "SIZE", "NEW", "ID"), rows)

    def create(self, **sizes: int) -> bool:
        """Make the store now, with ``cell_bytes`` and ``blob_bytes`` of one's own; False if it is there already."""
        return self.repository.create(**sizes)

    # looking

    def _resolve(self, ref: str | Checkpoint) -> commit_log.Commit:
        return refs.resolve(self.repository, ref.commit if isinstance(ref, Checkpoint) else ref)

    def get(self, ref: str | Checkpoint) -> Checkpoint:
        """The checkpoint that ``ref`` names. Raises NotFound, InvalidInput.

        An id (or 6 hex digits and more of it), RUN@STEP, RUN@latest, latest, or tag:NAME.
        """
        return Checkpoint(self.repository, self._resolve(ref))

    def __contains__(self, ref: str | Checkpoint) -> bool:
        try:
            self._resolve(ref)
        except (NotFound, Conflict):  # a checkpoint that is held may have been purged
            return False
        return True

    def checkpoints(self, run: str | None = None, *, forgotten: bool = False) -> list[Checkpoint]:
        """All checkpoints, oldest first; of one run if it is given. ``forgotten``: those that still live too."""
        found = commit_log.list_commits(self.repository)
        chosen = found.live() if forgotten else found.current()
        return [Checkpoint(self.repository, commit) for commit in chosen if run is None or commit.run == run]

    def runs(self) -> list[str]:
        """The names of all runs that have a visible checkpoint, sorted. Raises NotFound where there is no store."""
        return sorted({commit.run for commit in commit_log.list_commits(self.repository).current()})

    def diff(self, old: str | Checkpoint, new: str | Checkpoint) -> Difference:
        """Which tensors were added, removed, changed, and left as they were, from the manifests alone."""
        one, other = (manifests.get(self.repository, self._resolve(ref)) for ref in (old, new))
        return difference(one, other)

    def stats(self) -> StoreStats:
        """How many checkpoints and blobs there are, and their bytes."""
        return measure(self.repository)

    # keeping and removing

    def tag(self, name: str, ref: str | Checkpoint) -> None:
        """Let ``name`` name a checkpoint; every policy keeps it from then on. A forgotten one is restored.

        Raises Conflict if it was purged.
        """
        tags.set_tag(self.repository, name, self._resolve(ref))

    def tags(self) -> dict[str, Checkpoint]:
        """All tags, and the checkpoints that they name; without those whose records are damaged."""
        found, named = commit_log.list_commits(self.repository).commits, tags.list_tags(self.repository)
        for name in named.damaged:
            log.warning("the record of tag %s cannot be read: set the tag anew, or delete it", name)
        named_now = [tag for tag in named.tags.values() if tag.txid in found]
        return {tag.name: Checkpoint(self.repository, found[tag.txid]) for tag in named_now}

    def untag(self, name: str) -> None:
        """Remove a tag. Raises NotFound."""
        tags.delete_tag(self.repository, name)

    def forget(self, *refs: str | Checkpoint, tagged: bool = False, dry_run: bool = False) -> list[Checkpoint]:
        """Make checkpoints invisible, until they are restored, or purged by a gc; those named, ranges of steps too.

        ``tagged``: also those that a tag names, and the tags go too; without it they are a Conflict, and nothing is
        forgotten. ``dry_run``:
        only say which. Raises NotFound, InvalidInput, Conflict.
        """
        named = [ref.commit if isinstance(ref, Checkpoint) else ref for ref in refs]
        chosen = plan_forget(self.repository, named, tagged=tagged)
        if not dry_run:
            chosen = forget(self.repository, chosen)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def restore(self, ref: str | Checkpoint) -> Checkpoint:
        """Make a forgotten checkpoint visible again. Raises Conflict if it was purged, or beside a visible twin."""
        return Checkpoint(self.repository, commit_log.restore(self.repository, self._resolve(ref)))

    def gc(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_within: Duration | None = None,
        keep_daily: int | None = None,
        keep_weekly: int | None = None,
        keep_monthly: int | None = None,
        run: str | None = None,
        min_age: Duration | None = None,
        wait: Duration = WAIT,
        revoke_after: Duration | None = None,
        dry_run: bool = False,
        progress: Shown | None = None,
        tell: Tell | None = None,
    ) -> GcResult:
        """Forget what a policy does not keep, purge what was forgotten, delete what nothing needs; safe at any time.

        ``keep_last``, ``keep_every`` (step % N == 0), ``keep_within``, ``keep_daily``, ``keep_weekly``,
        ``keep_monthly``: the policy, a union, applied to each run by itself (see `Policy`); none of them forgets
        nothing. The newest of a run and tagged ones always stay. ``run``: only this run.

        Durations are a timedelta or text with a unit ("7d", "90s"); 0 needs none. ``min_age``: from forgetting to
        purging; until then `restore` brings a checkpoint back (default: the store's setting, else 24 h, and 15 minutes
        for ephemeral ones). ``wait``: for saves in progress, in all; then the rest is left to the next gc.
        ``revoke_after``: without a sign of life, until a save is given up on (default: the store's, else 1 h).

        ``progress`` is called with the number of objects deleted so far, and of all that are to be, ``tell`` with what
        is waited for.

        Raises Damaged if a live checkpoint cannot be read: then nothing is deleted. InvalidInput, StorageError.
        """
        policy = Policy(keep_last, keep_every, keep_within, keep_daily, keep_weekly, keep_monthly)
        wait_seconds, revoke_seconds = seconds_of(wait, "wait"), _optional(revoke_after, "revoke-after")
        plan = plan_gc(self.repository, policy, run=run, min_age=_optional(min_age, "min-age"))
        if dry_run:
            return preview(self.repository, plan)
        return execute(
            self.repository, plan, wait=wait_seconds, revoke_after=revoke_seconds,
            progress=Progress(progress), tell=tell or (lambda waiting: None),
        )  # fmt: skip

    # checking and copying

    def verify(
        self,
        *refs: str | Checkpoint,
        mode: Mode = "full",
        sample: float = 1.0,
        progress: Shown | None = None,
    ) -> VerifyResult:
        """Check all that live checkpoints need, or those that ``refs`` name; damaged blobs are marked in the store.

        ``mode``: "full" reads every blob and compares its hash, "exists" looks at presence and size. ``sample``: the
        fraction of the blobs to look at, drawn at random. ``progress`` is called with the bytes read so far,
        and all that are to be read. What is damaged stands in the result. Raises NotFound, InvalidInput,
        StorageError.
        """
        chosen = [ref.commit if isinstance(ref, Checkpoint) else ref for ref in refs] or None
        return verify(
            self.repository, refs=chosen, mode=mode, sample=sample, progress=Progress(progress),
        )  # fmt: skip

    def repair(self, *sources: Archive | str | os.PathLike[str], progress: Shown | None = None) -> RepairResult:
        """Put right bytes back where `verify`, or a save, found damage, or where blobs are gone.

        They come from other copies in this store, or in ``sources``, which are only read. ``progress`` is called with
        the bytes put back. What cannot be repaired stands in the result. Raises NotFound, StorageError.
        """
        others = [repository_of(one, self.repository.cache_dir) for one in sources]
        return repair(self.repository, sources=others, progress=Progress(progress))

    def copy_to(
        self,
        target: Archive | str | os.PathLike[str],
        *refs: str | Checkpoint,
        run: str | None = None,
        tags: bool = False,
        jobs: int | None = None,
        part: tuple[int, int] = (0, 1),
        dry_run: bool = False,
        progress: Shown | None = None,
    ) -> CopyResult:
        """Copy what ``refs`` name (ranges of steps too), or all that is visible, into another store.

        Only what it lacks is moved. Copies keep ids, times and order. Each is verified on the way, and visible in
        ``target`` once it is whole and durable there. ``target`` is made, with the cell and blob size of this store, if
        there is none. What it has forgotten stays forgotten, unless it is named. A copy that was killed goes on where
        it was. ``run``: only of this run. ``tags``: set the tags there too. ``jobs``: files on their way at once.
        ``part``: (rank, number of ranks), where several processes share the work. ``progress`` is called with bytes
        that are there now.

        Raises Damaged (naming blob and keys), Refused, or Conflict if ``target`` has another checkpoint under the run
        and step: of that checkpoint nothing is visible there, and all others are copied. NotFound, StorageError.
        """
        other = repository_of(target, self.repository.cache_dir)
        named = [ref.commit if isinstance(ref, Checkpoint) else ref for ref in refs]
        plan = copying.plan_copy(self.repository, other, named, run=run)
        if dry_run:
            return copying.preview(self.repository, other, plan)
        result = copying.execute(
            self.repository, other, plan, with_tags=tags, jobs=jobs, part=part,
            progress=Progress(progress),
        )  # fmt: skip
        result.raise_failure()
        return result

    def mirror_lag(self) -> MirrorLag:
        """How far the mirror is behind: checkpoints and bytes that are not safe there, and the age of the oldest.

        Raises InvalidInput for a store that was opened without one, StorageError.
        """
        return self._its_mirror().lag()

    def wait_for_mirror(self, timeout: float | None = None) -> None:
        """Return once all that is committed now is safe in the mirror: before a program ends, for instance.

        What is not copied when it ends, or dies, is copied when the store is opened with its mirror again. Raises what
        stands in the way (StorageError, Damaged, ...) after one more attempt; StorageError after ``timeout`` seconds.
        """
        self._its_mirror().wait(timeout)

    def _its_mirror(self) -> Mirror:
        if self._mirror is None:
            raise InvalidInput(f"{self.url} was opened without a mirror: give casckpt.open(..., mirror=URL)")
        return self._mirror


def _optional(duration: Duration | None, what: str) -> float | None:
    return None if duration is None else seconds_of(duration, what)


def repository_of(store: Archive | str | os.PathLike[str], cache_dir: Path | None) -> Repository:
    """What lies under a store that is open, or that is named. Raises InvalidInput or Unsupported for a bad URL."""
    return store.repository if isinstance(store, Archive) else open_repository(store, cache_dir=cache_dir)
