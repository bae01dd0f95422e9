"""Step 1 of a gc: forgets checkpoints by a policy, purges forgotten ones, and trims the old places of rewritten ones.

gc first makes a plan and then carries it out unchanged. If another process changes a checkpoint in between, that
change wins: forget, restore, purge, trim, rewrite and tag compete for the next record of a log. A rule reads the log,
then lists the tags, and then takes the next number of the log. A process that sets a tag takes that number too, so
either the tag is in the listing, or the rule finds the number taken. A purge or a trim reads the log, then the clock,
then lists the tags, because leases take no number.

If a process died after it created a tag and before it took the number, gc restores the checkpoint. `forget` deletes the
tags of a checkpoint first, so the checkpoint remains forgotten. An overwritten checkpoint also remains forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias

from casckpt.base.groups import grouped
from casckpt.base.names import Runs, is_among, run_hash
from casckpt.base.parallel import in_parallel
from casckpt.base.text import few
from casckpt.base.units import time_of
from casckpt.contents import manifests
from casckpt.errors import Conflict, Damaged, Refused, StorageError
from casckpt.format.keys import manifest_key, parse_txid
from casckpt.format.metrics import metric_values
from casckpt.format.names import TxId
from casckpt.format.records import Restored
from casckpt.history.commits import Commit, CommitList, append, forget, list_commits, purge, trim
from casckpt.history.folding import Places, kept_with
from casckpt.history.tags import FOREIGN_CLOCKS, Tag, tagged_txids, tags, tags_of
from casckpt.history.transactions import OpenTransaction
from casckpt.plan.retention import Policy, SavedCheckpoint, reasons_to_keep, runs_without, unmeasured
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Repository
from casckpt.storage.failures import noting
from casckpt.upkeep.copies.mirrored import ask
from casckpt.upkeep.gc.ages import AT_ONCE, MinAge, RecordTimes, min_age_of
from casckpt.upkeep.saves import check_own, check_settings

log = logging.getLogger(__name__)

_NAMED_AT_MOST = 5
_Action: TypeAlias = Callable[[Repository, Commit], Commit]


@dataclass(frozen=True)
class Deferred:
    """A checkpoint or transaction that a gc leaves for later, and the reason.

    ``reason``: "young" (forgotten; may be purged after ``until``), "replaced" (the old places of a rewritten
    checkpoint; may be trimmed after ``until``), "tagged" (forgotten, but protected by ``tags``; if all of them expire,
    until ``until``), "unmirrored" (not forgotten, purged or trimmed, because it is not safe in the store's mirror, or
    the mirror cannot be asked), or "transaction" (a save in progress that ``pid`` on ``host`` began at ``since``; gc
    waits until it ends). ``replaced``: True for old places, None otherwise.
    """

    reason: str
    run: str | None
    step: int | None
    id: str | None = None
    txid: str | None = None
    host: str | None = None
    pid: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    tags: tuple[str, ...] = ()
    replaced: bool | None = None


def waiting_for(transaction: OpenTransaction) -> Deferred:
    """Describe an open transaction that gc is waiting for."""
    txid, began = transaction.txid, transaction.began
    if began is None:
        return Deferred("transaction", None, parse_txid(txid).step, txid=txid, since=parse_txid(txid).time)
    process, since = began.process, time_of(began.time)
    return Deferred("transaction", began.run, began.step, txid=txid, host=process.host, pid=process.pid, since=since)


@dataclass(frozen=True)
class RefusedFile:
    """A file that gc could not delete or create, because this user may not.

    ``owner``: the owner of the file or, if it does not exist, of its folder; None if unknown. ``run``: None if unknown.
    """

    path: str
    owner: str | None
    run: str | None
    why: str


def refusals(errors: Iterable[StorageError], listed: CommitList) -> tuple[RefusedFile, ...]:
    """Describe what `noting` has noted, once for each path. ``listed``: commits, whose runs are named."""
    runs = {run_hash(commit.run): commit.run for commit in listed.commits.values() if commit.last != "revoked"}

    def run_of(path: str) -> str | None:
        return next((run for part, run in runs.items() if part in path), None)  # each key contains its run's hash

    found = {error.path: str(error) for error in errors}
    return tuple(RefusedFile(path, _owner(Path(path)), run_of(path), why) for path, why in found.items())


def _owner(path: Path) -> str | None:
    with suppress(OSError):
        there = next(one for one in (path, *path.parents) if one.exists())
        try:
            return there.owner()
        except KeyError:
            return str(there.stat().st_uid)
    return None


@dataclass(frozen=True)
class GcPlan:
    """The plan of a gc. ``forget``: commits to forget by the policy.

    ``purge``: commits that have reached their minimum age, at each of the places that end. If only old places are
    here, the checkpoint is trimmed. ``purge`` may include commits in ``forget``. ``waiting``:
    checkpoints that are kept for now, with reasons. ``young``: those of them that have not reached their minimum age.
    ``restore``: forgotten commits that have a tag without an expiration time. All of these are oldest first.
    ``listed``: the listing that the plan is based on. Checks use it to find guards, but no step of the protocol uses
    it. ``kept``: why visible checkpoints stay, by run@step. ``min_age``: None if the store's settings say it.
    """

    forget: tuple[Commit, ...]
    purge: tuple[Commit, ...]
    waiting: tuple[Deferred, ...] = ()
    young: tuple[Commit, ...] = ()
    restore: tuple[Commit, ...] = ()
    listed: CommitList = field(default_factory=lambda: CommitList({}, {}), repr=False, compare=False)
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    min_age: MinAge | None = field(default=None, repr=False, compare=False)


@dataclass
class RetireProgress:
    """The finished part of a plan.

    It grows after each action, so it is complete even after an error. ``revoked``: transactions that gc revoked.
    ``refused``: what this user may not do.
    """

    restored: list[Commit] = field(default_factory=list)
    forgotten: list[Commit] = field(default_factory=list)
    purged: list[Commit] = field(default_factory=list)
    revoked: list[TxId] = field(default_factory=list)
    refused: list[StorageError] = field(default_factory=list)


def plan_of(repo: Repository, commits: CommitList, policy: Policy, run: str | None = None) -> GcPlan:
    """Return the plan of a gc, or an empty plan if gc would raise an error."""
    try:
        ages = replace(min_age_of(repo, None), has_floor=False)  # fewer requests, for an estimate
        return without_unmirrored(repo, plan_retiring(repo, commits, policy, ages, run))
    except (Damaged, Refused):
        return GcPlan((), ())


def plan_retiring(repo: Repository, commits: CommitList, policy: Policy, min_age: MinAge, run: Runs) -> GcPlan:
    """Plan step 1 for ``commits``, without asking the mirror. Writes nothing.

    Raises `Damaged` or `Refused` if a tag cannot be read, if the settings are lost, or if a commit came from another
    store, and `StorageError`.
    """
    check_own(repo, commits.visible())
    check_settings(repo)
    named = tags(repo, anew=not repo.storage.traits.remote, slack=FOREIGN_CLOCKS, listed=commits)
    now = repo.clock()
    wanted = [commit for commit in commits.visible() if is_among(commit.run, run)]
    rated = [kept_of(commit) for commit in wanted]
    reasons = reasons_to_keep(rated, policy, now, without_best=unmeasured(rated, policy))
    tagged = tagged_txids(named, wanted)
    for commit in (commit for commit in wanted if commit.txid in tagged):
        reasons[commit.txid] += [f"tag {name}" for name in tags_of(named, commit.id)]
    for txid, other in kept_with(wanted).items():
        if other in reasons:
            reasons.setdefault(txid, reasons[other])
    forgets = {commit.txid: commit for commit in wanted if commit.txid not in reasons}
    kept = {f"{one.run}@{one.step}": reasons[one.txid] for one in wanted if one.txid in reasons}
    live = [commit for commit in commits.live() if is_among(commit.run, run)]
    back = _forgotten_though_tagged(named, commits, live)
    gone = [one for one in live if one not in back and (one.is_forgotten or one.txid in forgets or one.old)]
    ruined = _without_manifests(repo, [one for one in gone if one.is_forgotten] if min_age.has_floor else [])
    purges, waiting, young = list[Commit](), list[Deferred](), list[Commit]()
    claims, seen = _Claims(named, commits), {commit.run for commit in commits.visible()}
    now = now if min_age.times is None else min_age.times.now
    for commit in gone:
        ends = (*commit.old, commit) if commit.is_forgotten or commit.txid in forgets else tuple(commit.old)
        names = [] if commit.txid in forgets else claims.on(commit, ends)
        age = min_age.of(commit, seen)
        is_new = commit.txid in forgets or (min_age.times is not None and not age)
        until = (now if is_new else _gone_since(commit, now, min_age.times)) + age
        if names:
            until_then = _end([named[name] for name in names])
            waiting += [_waits(one, "tagged", until=until_then, tags=tuple(names)) for one in ends]
        elif until > now and commit.txid not in ruined and not all(_is_ruin(repo, one) for one in ends):
            for one in ends:
                waiting.append(_waits(one, "replaced" if one.is_old_places else "young", until=time_of(until)))
            young += ends
        else:
            purges += ends
    plan = GcPlan(tuple(forgets.values()), tuple(purges), tuple(waiting), tuple(young), tuple(back), commits, kept)
    return replace(plan, min_age=min_age)


def without_unmirrored(repo: Repository, plan: GcPlan) -> GcPlan:
    """Return ``plan`` without the checkpoints that are not safe in the store's mirror. They wait for it.

    Call this for the plan, and again right before `retire`. If the mirror cannot be asked, no checkpoint is safe, and
    this logs a warning.
    """
    # at old places, if they are to be trimmed
    asked = {one.txid: one for one in (*plan.purge, *plan.forget)}
    answer = ask(repo, asked.values())
    if not answer.unsafe:
        return plan
    if not answer.found:
        log.warning(
            "%s, so gc neither forgets nor purges checkpoints that only this store may have. Mount its disk, check the "
            "network and the credentials, or restore the mirror; `casckpt copy` fills a new mirror, and `casckpt "
            "settings %s --unset mirror` removes it from the settings",
            answer.problem, repo.storage.url,
        )  # fmt: skip
    unsafe = [asked[commit.txid] for commit in answer.unsafe]
    ends = [one for commit in unsafe for one in (*commit.old, *(() if commit.is_old_places else (commit,)))]
    held, places = {commit.txid for commit in unsafe}, {one.places.txid for one in ends}
    return replace(
        plan,
        forget=tuple(commit for commit in plan.forget if commit.txid not in held),
        purge=tuple(commit for commit in plan.purge if commit.txid not in held),
        waiting=(
            *(deferred for deferred in plan.waiting if deferred.txid not in places),
            *(_waits(one, "unmirrored") for one in sorted(ends, key=lambda one: one.places.txid)),
        ),
        young=tuple(commit for commit in plan.young if commit.txid not in held),
    )


def _gone_since(commit: Commit, now: int, times: RecordTimes | None) -> int:
    """Return the time at which a commit was forgotten or, if it is visible, at which it was rewritten.

    The time comes from the storage or, if that does not count, from the clock of the host that did so. If this time is
    before the save, that clock was slow, and the save time counts instead. A save time in the future does not count,
    because the saver's clock was fast.
    """
    if times is not None:
        return times.of(commit.txid, commit.moved_by if commit.visible else commit.changed_by)
    saved = commit.committed.time
    return max(commit.moved_at if commit.visible else commit.changed_at, saved if saved <= now else 0)


def kept_of(commit: Commit) -> SavedCheckpoint:
    """Return the properties of a commit that a policy uses."""
    record = commit.committed
    return SavedCheckpoint(
        commit.txid, record.run, record.step, record.created_at, metrics=metric_values(record.metrics),
        healthy=record.healthy,
    )  # fmt: skip


def check_metrics(repo: Repository, policy: Policy, run: Runs, *, trims: bool = False) -> None:
    """Raise InvalidInput if no visible checkpoint has the ``keep_best`` metric. Warn about runs without this metric.

    Call this only for a user's rules. A training run may set its rule before the first checkpoint has the metric.
    ``trims``: other rules trim the `unmeasured` runs.
    """
    if not policy.best:
        return
    visible = [kept_of(commit) for commit in list_commits(repo).visible() if is_among(commit.run, run)]
    found, trimmed = runs_without(visible, policy, run=run), unmeasured(visible, policy) if trims else set()
    for metric, runs in found.items():
        if kept := [one for one in runs if one not in trimmed]:
            message = "keep-best: no checkpoint of run %s has a number for %r, so gc keeps all of them"
            log.warning(message, few(kept, _NAMED_AT_MOST), metric)
    if trimmed:
        message = "keep-best: no checkpoint of run %s has any metric, so only the other rules apply to it"
        log.warning(message, few(sorted(trimmed), _NAMED_AT_MOST))


def _forgotten_though_tagged(
    named: Mapping[str, Tag], commits: CommitList, forgotten: Iterable[Commit]
) -> list[Commit]:
    """Return the commits in ``forgotten`` to restore, one per id.

    Each has a tag without an expiration time, and no visible checkpoint has its run and step. Omits overwritten
    checkpoints even if their successor is gone, because overwriting does not delete tags.
    """
    tagged = tagged_txids(_without_end(named), forgotten := list(forgotten))
    wanted = [commit for commit in forgotten if commit.is_forgotten and commit.txid in tagged]
    taken = {(commit.run, commit.step) for commit in commits.visible()} if wanted else set()
    every = sorted(commits.commits) if wanted else ()
    saved = (commits.commits[txid] for txid in every if commits.commits[txid].last != "revoked")
    last = {(one.run, one.step): one.id for one in saved}
    free = [one for one in wanted if (one.run, one.step) not in taken and last[one.run, one.step] == one.id]
    return list({commit.id: commit for commit in free}.values())


def _without_end(named: Mapping[str, Tag]) -> dict[str, Tag]:
    return {name: tag for name, tag in named.items() if tag.expires is None}


def bring_back(repo: Repository, plan: GcPlan, done: RetireProgress) -> None:
    """Restore the checkpoints of ``plan``. Skip commits that have since lost their tag or changed.

    Raises `Damaged` or `Refused` if a tag cannot be read, and `StorageError`.
    """
    tagged = tagged_txids(_without_end(_tags_now(repo)), plan.restore) if plan.restore else set()
    wanted = [commit for commit in plan.restore if commit.txid in tagged]
    _each_unless_changed(repo, partial(append, kind=Restored), wanted, done.restored, done.refused)


def thinned_though_claimed(repo: Repository, listed: CommitList, since: int) -> list[Commit]:
    """Return the commits that were thinned before ``since`` despite a tag, at the places that the tag needs.

    The process that set the tag then died before it brought the places back. Raises `Damaged` or `Refused` if a tag
    cannot be read, and `StorageError`.
    """
    thin = [one for one in listed.visible() if one.dropped is not None and one.old and one.moved_at <= since]
    named = _without_end(tags(repo)) if thin else {}
    claims, wanted = _Claims(named, listed), list[Commit]()
    for commit in thin:
        on = [_set_on(named[name], commit) for name in claims.on(commit, commit.old)]
        enough = [one for one in commit.old if all(places and one.places.holds(places) for places in on)]
        if on:
            wanted.append(max(enough or commit.old, key=lambda one: one.lacking))
    return wanted


def _without_manifests(repo: Repository, forgotten: Sequence[Commit]) -> set[TxId]:
    """Return which of the ``forgotten`` checkpoints have no manifest. gc fails while it does not purge them."""
    places = [each for commit in forgotten for each in commit.existing]
    keys = [manifest_key(each.txid, each.record.manifest) for each in places]
    sizes = in_parallel(repo.storage.traits.requests, repo.storage.size, keys)
    there = {each.txid for each, size in zip(places, sizes, strict=True) if size is not None}
    return {commit.txid for commit in forgotten if there.isdisjoint(each.txid for each in commit.existing)}


def _is_ruin(repo: Repository, commit: Commit) -> bool:
    """Return whether these are old places with a damaged manifest, and the current ones have all entries.

    gc fails while such places exist.
    """
    if commit.current is None or not commit.is_old_places or not commit.current.holds(commit.places):
        return False
    return not manifests.is_stored(repo, commit)


def _waits(commit: Commit, reason: str, *, until: datetime | None = None, tags: tuple[str, ...] = ()) -> Deferred:
    return Deferred(
        reason, commit.run, commit.step, id=commit.id, txid=commit.places.txid, until=until, tags=tags,
        replaced=commit.is_old_places or None,
    )  # fmt: skip


def retire(repo: Repository, plan: GcPlan, done: RetireProgress) -> None:
    """Forget and purge the checkpoints of ``plan``, and add them to ``done``, which must not have them yet.

    Skips commits that another process has since changed or tagged. The caller has just asked the mirror: between the
    log that it read and these records, nothing else happens to a checkpoint. Raises `StorageError`, and `Unsupported`
    if this version does not know one of the store's requirements for writers.
    """
    _each_unless_changed(repo, forget, plan.forget, done.forgotten, done.refused)
    now = {commit.txid: commit for commit in done.forgotten}  # as this gc last read them
    due = [now.get(commit.txid, commit).at(commit.places) for commit in plan.purge]
    check_requirements(repo)  # again, because there may be new requirements for writers
    held = _barred(repo, due)
    left = grouped((commit for commit in due if commit.txid not in held), lambda commit: commit.txid)

    def end(repo: Repository, commit: Commit) -> Commit:
        return purge(repo, commit) if commit.is_forgotten else trim(repo, commit)

    ended: list[Commit] = []
    logs = [commits[-1] for commits in left.values() if commits[-1].is_old_places or commits[-1].is_forgotten]
    try:
        _each_unless_changed(repo, end, logs, ended, done.refused)
    finally:
        after = {commit.txid: commit for commit in ended}
        done.purged += [after[one.txid].at(one.places) for one in due if one.txid in after]


def forget_and_purge(repo: Repository, commits: Iterable[Commit]) -> list[Commit]:
    """Forget ``commits``, as they were just read, and purge them immediately without a gc. Return the forgotten ones.

    If the store's settings have a minimum age, a later gc purges them instead. Skips commits that have a tag or are
    not yet safe in the store's mirror. Raises `StorageError`.
    """
    wanted = list(commits)
    tagged = tagged_txids(_tags_now(repo), wanted) if wanted else set()
    chosen = [commit for commit in wanted if commit.txid not in tagged]
    return _retire_at_once(repo, chosen, chosen)


def trim_now(repo: Repository, rewritten: Iterable[Commit]) -> None:
    """Trim the old places of rewritten checkpoints immediately, without running gc, as `forget_and_purge` does."""
    _retire_at_once(repo, (), [old for commit in rewritten for old in commit.old])


def _retire_at_once(repo: Repository, forget: Sequence[Commit], purge: Sequence[Commit]) -> list[Commit]:
    check_requirements(repo)
    ages, done = min_age_of(repo, None, AT_ONCE), RetireProgress()
    plan = GcPlan(tuple(forget), tuple(commit for commit in purge if not ages.of(commit)))
    retire(repo, without_unmirrored(repo, plan), done)
    for one in refusals(done.refused, list_commits(repo) if done.refused else plan.listed):
        log.warning("rotation left a checkpoint of run %s: %s (owner: %s)", one.run, one.why, one.owner)
    purged = {commit.txid: commit for commit in done.purged}
    return [purged.get(commit.txid, commit) for commit in done.forgotten]


def _tags_now(repo: Repository) -> dict[str, Tag]:
    """Return the tags that count now, including those that expired less than an hour ago."""
    return tags(repo, slack=FOREIGN_CLOCKS)


def _barred(repo: Repository, commits: Sequence[Commit]) -> set[TxId]:
    """Return the logs of ``commits`` that tags protect. The caller read these logs before this call."""
    named = _tags_now(repo) if commits else {}
    if not tagged_txids(named, commits):
        return set()
    claims, by_log = _Claims(named, list_commits(repo)), grouped(commits, lambda commit: commit.txid)
    return {txid for txid, ends in by_log.items() if claims.on(ends[-1], ends)}


class _Claims:
    """What tags ask of checkpoints that are forgotten or were rewritten."""

    def __init__(self, named: Mapping[str, Tag], listed: CommitList) -> None:
        self._named = grouped(named.items(), lambda one: one[1].manifest)
        self._seen = grouped(listed.visible() if named else (), lambda commit: commit.id)

    def on(self, commit: Commit, ends: Iterable[Commit]) -> list[str]:
        """Return the tags that need ``ends``: places of the log of ``commit`` that are to be purged or trimmed.

        No tag needs them if visible checkpoints have all of their entries. A tag does not need old places if the
        current ones have all entries of the places on which it was set.
        """
        named = [name for name, tag in self._named.get(commit.id, ()) if _asks_for_more(tag, commit)]
        seen = [other.places for other in self._seen.get(commit.id, ())]
        held = all(any(places.holds(one.places) for places in seen) for one in ends)
        return [] if held else sorted(named)


def _asks_for_more(tag: Tag, commit: Commit) -> bool:
    if commit.current is None or commit.last == "forgotten":
        return True
    on = _set_on(tag, commit)
    return on is None or not commit.current.holds(on)


def _set_on(tag: Tag, commit: Commit) -> Places | None:
    """Return the places on which a tag was set, if the log of ``commit`` has named them."""
    return next((places for places in (*commit.existing, *commit.ended) if places.txid == tag.txid), None)


def _end(named: Iterable[Tag]) -> datetime | None:
    """Return when gc will consider all these tags expired, or None if one of them never expires."""
    ends = [tag.expires for tag in named]
    known = [end + FOREIGN_CLOCKS for end in ends if end is not None]
    return time_of(max(known)) if known and len(known) == len(ends) else None


def _each_unless_changed(
    repo: Repository, action: _Action, commits: Iterable[Commit], done: list[Commit], refused: list[StorageError]
) -> None:
    """Call ``action`` on each commit, and add the results to ``done``. Skip commits that another process changed.

    If this user may not write a record, the commit keeps its state, and therefore remains a root.
    """

    def attempt(commit: Commit) -> None:
        with suppress(Conflict), noting(refused):
            done.append(action(repo, commit))

    try:
        for _ in in_parallel(repo.storage.traits.requests, attempt, commits):
            pass
    finally:
        done.sort(key=lambda commit: commit.txid)  # because threads append in any order
