"""Forgets checkpoints and restores them: those that a caller names, and after each save, the old ones of its run.

The latter is rotation. It runs after the commit. Therefore, the newest checkpoint, tagged checkpoints and checkpoints
at fixed steps can always be loaded. Thinned checkpoints are restored here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from casckpt.base.parallel import in_parallel
from casckpt.contents import manifests
from casckpt.contents.refs import resolve_forgotten, resolve_many
from casckpt.errors import CasckptError, Conflict, Gone, StorageError
from casckpt.format.names import TxId
from casckpt.history import commits
from casckpt.history.announcements import announce
from casckpt.history.commits import Commit, CommitList, check_restore, list_commits
from casckpt.history.folding import kept_with
from casckpt.history.tags import FOREIGN_CLOCKS, delete_tag, tagged_txids, tags, tags_of
from casckpt.plan.retention import Rotation, Thinning, newest_of, reasons_to_keep
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.replication import Work, replicate
from casckpt.upkeep.gc.gc import with_room
from casckpt.upkeep.gc.purge import forget_and_purge, kept_of, trim_now
from casckpt.upkeep.saves import check_own
from casckpt.upkeep.thin import execute, plan_thin, whole_of

log = logging.getLogger(__name__)
_WARN_EVERY = 10  # checkpoints


def plan_forget(repo: Repository, refs: Iterable[str | Commit], *, tagged: bool = False) -> list[Commit]:
    """Return the current commits of the checkpoints and ranges in ``refs``, without duplicates. Writes nothing.

    ``tagged``: allow tagged checkpoints, which otherwise raise `Conflict`. Raises the errors of `resolve_many`, and
    `Damaged` or `Refused` if a tag cannot be read.
    """
    chosen = resolve_many(repo, refs)
    named = tags(repo)
    protected = [(commit, names) for commit in chosen if (names := tags_of(named, commit.id))]
    if protected and not tagged:
        shown = "; ".join(f"{commit} by {', '.join(names)}" for commit, names in protected[:5])
        raise Conflict(
            f"tags protect {len(protected)} of the checkpoints: {shown}. Nothing was forgotten; delete the "
            "tags, or pass --tagged (tagged=True)",
            checkpoints=tuple(commit.id for commit, _ in protected),
        )
    return chosen


def forget(repo: Repository, chosen: Iterable[Commit]) -> list[Commit]:
    """Forget the checkpoints that `plan_forget` returned. Delete their tags first, because tags prevent a purge.

    Leases remain until they expire, because their holders rely on them.
    """
    check_requirements(repo)
    named = {name: tag for name, tag in tags(repo).items() if tag.expires is None}
    done = []
    for commit in chosen:
        for name in tags_of(named, commit.id):
            delete_tag(repo, name)
        done.append(commits.forget(repo, commit))
    return done


def forget_chosen(repo: Repository, refs: Iterable[str | Commit], *, tagged: bool, dry_run: bool) -> list[Commit]:
    """Forget the checkpoints in ``refs`` or, with ``dry_run``, only plan to do so."""
    chosen = plan_forget(repo, refs, tagged=tagged)
    return chosen if dry_run else with_room(repo, partial(forget, repo, chosen))


@dataclass(frozen=True)
class CommitFailure:
    """A checkpoint for which a call failed, and the error."""

    commit: Commit
    error: CasckptError


@dataclass(frozen=True)
class RestoreResult:
    """The result of a restore or, with ``dry_run``, the expected result.

    ``visible``: commits that were visible before. ``left``: commits that were not attempted because the storage failed.
    """

    restored: tuple[Commit, ...] = ()
    visible: tuple[Commit, ...] = ()
    failed: tuple[CommitFailure, ...] = ()
    left: tuple[Commit, ...] = ()
    dry_run: bool = False

    def raise_failure(self) -> None:
        """If ``failed`` is not empty, raise its last error. The message includes the number of restored checkpoints."""
        if not self.failed:
            return
        error, wanted = self.failed[-1].error, len(self.restored) + len(self.failed) + len(self.left)
        more = f" ({len(self.restored)} of {wanted} were restored)" if wanted > 1 else ""
        raise type(error)(f"{error}{more}", **error.__dict__) from error


def plan_restore(
    repo: Repository, refs: Iterable[str | Commit], *, whole: bool = False
) -> tuple[list[Commit], CommitList]:
    """Return the forgotten checkpoints and ranges in ``refs``, without duplicates, and the listing that has them.

    Writes nothing. ``whole``: instead choose the commits from before the checkpoints were thinned. Raises `Conflict`
    if a checkpoint cannot be restored, or if two have the same run and step. Also raises the errors of
    `resolve_forgotten` and `casckpt.upkeep.thin.whole_of`.
    """
    listed = list_commits(repo)
    found = (commit for ref in refs for commit in _named(repo, ref, listed, whole=whole))
    named = map(whole_of, found) if whole else found
    chosen = {commit.txid: commit for commit in named}
    at: dict[tuple[str, int], Commit] = {}
    for commit in chosen.values():
        if commit.live:
            check_restore(listed, commit)
        other = at.setdefault((commit.run, commit.step), commit)
        if other is not commit:
            message = f"{commit} and {other} have the same run and step. Nothing was restored; pass only one of them"
            raise Conflict(message, checkpoints=(commit.id, other.id))
    return list(chosen.values()), listed


def restore(repo: Repository, chosen: Sequence[Commit], listed: CommitList) -> RestoreResult:
    """Restore the commits that `plan_restore` returned, and return the result of each.

    A commit that another process has changed is not restored. Raises `Unsupported` if this version does not know one of
    the store's requirements for writers.
    """
    check_requirements(repo)
    restored: dict[str, Commit] = {}
    failed: list[CommitFailure] = []

    def attempt(commit: Commit) -> None:
        try:
            if commit.live:
                restored[commit.txid] = commits.restore(repo, commit, listed=listed)
            else:
                restored[commit.txid] = replicate(repo, repo, commit, Work())
        except CasckptError as error:
            failed.append(CommitFailure(commit, error))
            if isinstance(error, StorageError):  # the other commits would fail in the same way
                raise

    try:
        announce(repo, [(commit.txid, commit.number + 1) for commit in chosen if commit.is_forgotten])
        for _ in in_parallel(repo.storage.traits.requests, attempt, chosen):
            pass
    except StorageError:
        if not failed:  # only the announcement failed
            raise
    except BaseException:  # most likely an interrupt
        log.warning("restored %d of %d: %s", len(restored), len(chosen), ", ".join(map(str, restored.values())))
        raise
    tried = {failure.commit.txid for failure in failed} | restored.keys()
    left = tuple(commit for commit in chosen if commit.txid not in tried)
    done = tuple(restored[commit.txid] for commit in chosen if commit.txid in restored)
    return RestoreResult(*_apart(done, chosen), tuple(failed), left)


def _apart(done: Sequence[Commit], before: Sequence[Commit]) -> tuple[tuple[Commit, ...], tuple[Commit, ...]]:
    """Divide the commits that are ``done`` into restored ones, and those that were visible ``before``."""
    visible = {commit.txid for commit in before if commit.visible and not commit.is_old_places}
    restored = tuple(commit for commit in done if commit.txid not in visible)
    return restored, tuple(commit for commit in done if commit.txid in visible)


def restore_chosen(
    repo: Repository, refs: Iterable[str | Commit], *, whole: bool, dry_run: bool, check: bool
) -> RestoreResult:
    """Restore the checkpoints in ``refs`` or, with ``dry_run``, only plan to do so.

    ``check``: raise an error if a checkpoint cannot be restored.
    """
    chosen, listed = plan_restore(repo, refs, whole=whole)
    if dry_run:
        return RestoreResult(*_apart(chosen, chosen), dry_run=True)
    result = restore(repo, chosen, listed)
    if check:
        result.raise_failure()
    return result


def _named(repo: Repository, ref: str | Commit, listed: CommitList, *, whole: bool) -> list[Commit]:
    """Return the commits that ``ref`` names. Older places of a commit are returned unchanged.

    Returns a purged commit at places that gc has not deleted yet.
    """
    if isinstance(ref, Commit) and ref.is_old_places:
        return [ref]
    if not whole:
        try:
            return resolve_forgotten(repo, ref, listed)
        except Gone as error:
            purged = [one for one in listed.commits.values() if one.last == "purged" and one.id in error.checkpoints]
            every = [one.at(places) for one in purged for places in one.ended]
            found = [one for one in every if manifests.is_stored(repo, one)]
            if not found:
                raise
            return [min(found, key=lambda one: one.lacking)]
    named = resolve_many(repo, [ref], listed)
    return [commit for commit in named if commit.dropped is not None] or named


def plan_rotation(visible: Sequence[Commit], rotation: Rotation, tagged: Container[TxId], now: int) -> list[Commit]:
    """Return which of the ``visible`` checkpoints of one run to forget, oldest first.

    ``now``: the current time in microseconds. The newest checkpoint is the one that was saved last, even if the run was
    rolled back. If two checkpoints have the same step, the one saved last is kept.
    """
    if rotation.is_empty or not visible:
        return []
    current = sorted({commit.step: commit for commit in visible}.values(), key=lambda commit: commit.txid)
    permanent = [commit for commit in current if not commit.committed.ephemeral]
    keep = {commit.txid for commit in newest_of([*map(kept_of, current)])}
    keep |= {commit.txid for commit in current if commit.step in rotation.fixed}
    if rotation.keep is not None:
        keep |= reasons_to_keep(map(kept_of, permanent), rotation.keep, now).keys()
    if rotation.max_checkpoints is not None:
        counted = [commit for commit in permanent if commit.step not in rotation.fixed and commit.txid not in tagged]
        keep |= {commit.txid for commit in counted[-rotation.max_checkpoints :]}
    gone = {commit.txid for commit in visible if commit.txid not in keep and commit.txid not in tagged}
    gone -= {one for one, other in kept_with(visible).items() if other not in gone}
    return [commit for commit in visible if commit.txid in gone]


def rotate(repo: Repository, run: str, rotation: Rotation, among: Container[str] | None = None) -> list[Commit]:
    """Forget and purge the checkpoints of ``run`` that ``rotation`` does not keep, and return them.

    ``among``: the ids of the only checkpoints that may go; the rules count no others. None for all. Exactly one process
    must call this. The next gc frees the space. If the store's settings have a minimum age, gc purges the checkpoints
    instead. Checkpoints that are not yet safe in the mirror, or whose log has a record that cannot be read, are kept. A
    tag that is set in the meantime counts. Raises Damaged or Refused if a tag cannot be read, and StorageError.
    """
    if rotation.is_empty:
        return []
    listed = list_commits(repo)
    certain = (commit for commit in listed.visible() if commit.txid not in listed.damaged)
    visible = [commit for commit in certain if commit.run == run and (among is None or commit.id in among)]
    now = repo.clock()
    _warn_of_metrics(run, visible, rotation)
    if not plan_rotation(visible, rotation, (), now):  # tags can only keep more checkpoints
        return []
    check_own(repo, visible)
    tagged = tagged_txids(tags(repo, slack=FOREIGN_CLOCKS, listed=listed), visible)
    dropped = plan_rotation(visible, rotation, tagged, now)
    return with_room(repo, partial(forget_and_purge, repo, dropped))


def _warn_of_metrics(run: str, visible: Sequence[Commit], rotation: Rotation) -> None:
    """Warn if all checkpoints are kept because none of them has the ``keep_best`` metric.

    Does so at the first checkpoint with other metrics, and at every tenth checkpoint.
    """
    permanent = [kept_of(one) for one in visible if not one.committed.ephemeral]
    others = [sorted(one.metrics) for one in permanent if one.metrics]
    if rotation.keep is None or not permanent or (len(permanent) % _WARN_EVERY and len(others) != 1):
        return
    for best in rotation.keep.best:
        if not any(map(best.is_known_of, permanent)):
            message = "keep_best: none of the %d checkpoints of run %s has a number for %r, so all of them are kept%s"
            log.warning(
                message, len(permanent), run, best.metric, f" (they have {', '.join(others[-1])})" if others else ""
            )


def thin(repo: Repository, run: str, rule: Thinning | None, among: Container[str] | None = None) -> list[Commit]:
    """Thin the checkpoints of ``run`` by ``rule``, trim their old places, and return the new commits.

    ``among``: as for `rotate`. If the store's settings have a minimum age, gc trims them instead. Skips
    damaged checkpoints. Raises the errors of `rotate`.
    """
    if rule is None:
        return []
    plan = plan_thin(repo, drop=rule.drop, keep=rule.keep, run=run, among=among)
    if not plan.thin:
        return []
    made = with_room(repo, partial(execute, repo, plan))
    trim_now(repo, made)
    return list(made)
