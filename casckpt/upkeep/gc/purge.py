"""Step 1 of a gc: checkpoints that a policy forgets, and forgotten or rewritten ones that are purged or restored.

A plan is made first, from what the store says; the very same plan is then carried out. What changed in between stays
as somebody else left it: forget, restore and purge race for the next record of a log, and tags are listed again. For a
purge the order is: read the `forgotten` record, then the clock, then list tags, then take the number right behind that
record. A tag that was granted meanwhile is seen, or has taken the number; so has a restore, even one before another
forget.

A gc that has forgotten what was tagged meanwhile restores it. If it was killed before that, the next one does so: it
reads logs, then lists tags, then takes the number right behind `forgotten`. Whoever forgets a checkpoint by its name
ends such tags first; so what a person has forgotten stays forgotten. What was overwritten does, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from casckpt.base.durations import time_of
from casckpt.base.groups import grouped
from casckpt.base.parallel import in_parallel
from casckpt.contents import manifests
from casckpt.errors import Conflict, Damaged, Gone, Refused
from casckpt.format import records
from casckpt.format.keys import parse_txid
from casckpt.format.metrics import metric_values
from casckpt.format.names import TxId
from casckpt.format.records import Restored, Settings
from casckpt.history.commits import Commit, CommitList, announce_all, append, forget, list_commits, purge, restore
from casckpt.history.folding import STANDS, VOID, Holdings
from casckpt.history.tags import FOREIGN_CLOCKS, Tag, tagged_txids, tags, tags_of
from casckpt.history.transactions import OpenTransaction
from casckpt.plan.retention import Policy, RetentionCandidate, plan_forget, runs_without
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.mirror_notes import NO_STORE, mirror_made_at, mirror_to_wait_for, unmirrored

log = logging.getLogger(__name__)

_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Deferred:
    """What a gc leaves for later, and why.

    ``reason``: "young" (forgotten, may be purged after ``until``), "replaced" (rewritten, or a rewrite that was undone;
    so may these old places be), "tagged" (forgotten, but ``tags`` name it; ``until`` then, if all of them expire),
    "unmirrored" (neither forgotten nor purged, for it is not safe in the store's mirror yet, or that is not there), or
    "transaction" (a save in progress that ``host`` and ``pid`` began at ``since``; deleting waits for its end).
    ``replaced``: True where only old places are meant, None otherwise.
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


def waiting_for(one: OpenTransaction) -> Deferred:
    """Describe a transaction in the way, for people."""
    began = one.began
    if began is None:
        return Deferred("transaction", None, parse_txid(one.txid).step, txid=one.txid, since=parse_txid(one.txid).time)
    since = time_of(began.time)
    process = began.process
    return Deferred(
        "transaction", began.run, began.step, txid=one.txid, host=process.host, pid=process.pid, since=since
    )


@dataclass(frozen=True)
class GcPlan:
    """What a gc will do. ``forget``: chosen by the policy. ``purge``: forgotten or replaced for long enough.

    What is about to be forgotten may be purged, too. ``waiting``: checkpoints that stay yet, and why; ``young``: those
    of them that are gone from sight, or will be, but not for long enough. ``restore``: forgotten, though a tag without
    an end names them. All are oldest first. ``mirror``: URL of the one that what goes is noted to be safe in.
    """

    forget: tuple[Commit, ...]
    purge: tuple[Commit, ...]
    waiting: tuple[Deferred, ...] = ()
    young: tuple[Commit, ...] = ()
    restore: tuple[Commit, ...] = ()
    mirror: str | None = None


@dataclass
class RetireProgress:
    """What was done so far of a plan. Filled as things happen, so that an error on the way loses nothing of it."""

    restored: list[Commit] = field(default_factory=list)
    forgotten: list[Commit] = field(default_factory=list)
    purged: list[Commit] = field(default_factory=list)


@dataclass(frozen=True)
class MinAge:
    """Seconds from the forget record until a checkpoint may be purged."""

    usual: float
    ephemeral: float

    def of(self, commit: Commit) -> int:
        """Return the minimum age of a commit, in microseconds."""
        return round(1e6 * (self.ephemeral if commit.committed.ephemeral else self.usual))


A_DAY = MinAge(24 * 3600.0, 15 * 60.0)  # for so long a wrong rule can be undone
AT_ONCE = MinAge(0.0, 0.0)


def min_age_of(repo: Repository, wanted: float | None, unset: MinAge = A_DAY) -> MinAge:
    """Return ``wanted`` seconds, else what the settings say, else ``unset``."""
    if wanted is not None:
        return MinAge(wanted, wanted)
    settings: Settings = repo.settings
    usual = settings.min_age_seconds
    ephemeral = settings.min_age_ephemeral_seconds
    return MinAge(unset.usual if usual is None else usual, unset.ephemeral if ephemeral is None else ephemeral)


def plan_of(repo: Repository, commits: CommitList, policy: Policy, run: str | None = None) -> GcPlan:
    """Return what a gc would do; nothing where it would refuse to work."""
    try:
        return plan_retiring(repo, commits, policy, min_age_of(repo, None), run)
    except (Damaged, Refused):
        return GcPlan((), ())


def plan_retiring(repo: Repository, commits: CommitList, policy: Policy, min_age: MinAge, run: str | None) -> GcPlan:
    """Plan for ``commits``. Writes nothing. Raises `Damaged` or `Refused` if a tag cannot be read, `StorageError`."""
    named = tags(repo, anew=not repo.storage.traits.remote, slack=FOREIGN_CLOCKS)
    now = repo.clock()
    visible = {commit.txid: commit for commit in commits.visible()}
    tagged = _claimed(named, commits, commits.live()) - _free(commits, commits.live())
    kept = map(kept_of, visible.values())
    forgets = [visible[one.txid] for one in plan_forget(kept, policy, now, tagged=tagged, run=run)]
    purges, waiting, young = [], [], []
    forgotten = [c for c in commits.live() if c.last in ("forgotten", "replaced") and (run is None or c.run == run)]
    back = _forgotten_though_tagged(named, commits, forgotten)
    gone = [commit for commit in [*forgotten, *forgets] if commit not in back]
    mirror = mirror_to_wait_for(repo)
    unsafe = _unsafe(repo, gone, mirror)
    for commit in sorted(gone, key=lambda commit: commit.order):
        until = _gone_since(commit, now) + min_age.of(commit)
        if commit.txid in unsafe:
            waiting.append(_waits(commit, "unmirrored"))
        elif commit.txid in tagged:
            names = tags_of(named, commit.id)
            until_then = _end([named[name] for name in names])
            waiting.append(_waits(commit, "tagged", until=until_then, tags=tuple(names)))
        elif until > now and not _is_ruin(repo, commits, commit):
            waiting.append(_waits(commit, "replaced" if _is_old(commit) else "young", until=time_of(until)))
            young.append(commit)
        else:
            purges.append(commit)
    chosen = tuple(commit for commit in forgets if commit.txid not in unsafe)
    return GcPlan(chosen, tuple(purges), tuple(waiting), tuple(young), tuple(back), mirror)


def unless_mirror_is_gone(repo: Repository, plan: GcPlan, *, near: bool = False) -> GcPlan:
    """Return ``plan``, or one that does not retire what was safe in a store that is at the mirror no more.

    That may be had here alone. ``near``: see `mirror_made_at`.
    """
    relied = {one.txid: one for one in (*plan.purge, *plan.forget)}
    made = mirror_made_at(repo, plan.mirror, near=near) if plan.mirror and relied else None
    held = set() if made is None else _unsafe(repo, relied.values(), plan.mirror, made)
    if not held:
        return plan
    log.warning(
        "%s %s, so %d checkpoints are neither forgotten nor purged here: mount its disk, or put it back; "
        "`casckpt copy` fills a new one, and `casckpt settings %s --unset mirror` gives it up",
        "there is no store at the mirror" if made == NO_STORE else "they were safe in another store at the mirror",
        plan.mirror, len(held), repo.storage.url,
    )  # fmt: skip
    waiting = [_waits(relied[txid], "unmirrored") for txid in sorted(held, key=lambda txid: relied[txid].order)]
    return replace(
        plan,
        forget=tuple(one for one in plan.forget if one.txid not in held),
        purge=tuple(one for one in plan.purge if one.txid not in held),
        waiting=(*(one for one in plan.waiting if one.txid not in held), *waiting),
        young=tuple(one for one in plan.young if one.txid not in held),
    )


def _gone_since(commit: Commit, now: int) -> int:
    """Return when a commit was forgotten or replaced; now for one that will be.

    By the clock of whoever did that, but not before the save: then that clock was behind. A save in the future says
    nothing: then the clock of the saver was ahead.
    """
    saved = commit.committed.time
    return now if commit.visible else max(commit.changed_at, saved if saved <= now else 0)


def kept_of(commit: Commit) -> RetentionCandidate:
    """Return a commit as a policy sees it."""
    said = commit.committed
    metrics = metric_values(said.metrics)
    return RetentionCandidate(commit.txid, said.run, said.step, said.created_at, metrics=metrics, healthy=said.healthy)


def check_metrics(repo: Repository, policy: Policy, run: str | None) -> None:
    """Raise InvalidInput for a metric of ``keep_best`` that no visible checkpoint has; warn of runs that lack it.

    For rules that a person gives. A training may well give its own before the first checkpoint that has the metric.
    """
    if not policy.best:
        return
    visible = map(kept_of, list_commits(repo).visible())
    for metric, runs in runs_without(visible, policy, run=run).items():
        if runs:
            more = f" and {len(runs) - _NAMED_AT_MOST} more" if runs[_NAMED_AT_MOST:] else ""
            named = ", ".join(runs[:_NAMED_AT_MOST]) + more
            log.warning("keep-best: no checkpoint of run %s has a number for %r, so all of these stay", named, metric)


def _forgotten_though_tagged(
    named: Mapping[str, Tag], commits: CommitList, forgotten: Iterable[Commit]
) -> list[Commit]:
    """Return which of ``forgotten`` a tag without an end names, and nothing is visible in their place; one of an id.

    What was overwritten is none of them, whatever became of what was saved in its place: that ends no tag.
    """
    tagged = tagged_txids(_without_end(named), forgotten := list(forgotten))
    wanted = [one for one in forgotten if one.is_forgotten and one.txid in tagged]
    taken = {(commit.run, commit.step) for commit in commits.visible()} if wanted else set()
    stood = [one for one in commits.commits.values() if one.last != "revoked" and one.standing == STANDS]
    last = {(one.run, one.step): one.id for one in sorted(stood if wanted else (), key=lambda one: one.order)}
    found = [one for one in wanted if (one.run, one.step) not in taken and last[one.run, one.step] == one.id]
    return list({commit.id: commit for commit in found}.values())


def _without_end(named: Mapping[str, Tag]) -> dict[str, Tag]:
    return {name: tag for name, tag in named.items() if tag.expires is None}


def bring_back(repo: Repository, plan: GcPlan, done: RetireProgress) -> None:
    """Restore what ``plan`` says. What somebody has untagged or changed since is left alone.

    Raises `Damaged` or `Refused` if a tag cannot be read, `StorageError`.
    """
    tagged = tagged_txids(_without_end(_tags_now(repo)), plan.restore) if plan.restore else set()
    wanted = [commit for commit in plan.restore if commit.txid in tagged]
    _each_unless_changed(repo, lambda repo, commit: append(repo, commit, Restored), wanted, done.restored)


def thinned_though_claimed(repo: Repository, listed: CommitList, since: int) -> list[Commit]:
    """Return what was thinned before ``since``, though a tag claims all of it; of each id what lacks least.

    Who thins looks at tags again when it is done, and restores what was tagged meanwhile. So it was killed before that.
    Raises `Damaged` or `Refused` if a tag cannot be read, `StorageError`.
    """
    seen = {commit.id for commit in listed.visible()}
    replaced = (one for one in listed.standing() if one.last == "replaced" and one.changed_at <= since)
    wanted = [one for one in replaced if one.id in seen]
    found = tags(repo) if wanted else {}
    claimed = _claimed(found, listed, wanted) - _free(listed, wanted)
    most = sorted((one for one in wanted if one.txid in claimed), key=lambda one: one.bytes_held)
    return list({commit.id: commit for commit in most}.values())


def _is_ruin(repo: Repository, commits: CommitList, commit: Commit) -> bool:
    """Tell whether a commit was rewritten without a loss, and its manifest is damaged: no gc deletes while it lives."""
    if commits.standin(commit) is commit:
        return False
    try:
        manifests.stored_blobs(repo, commit)
    except (Damaged, Gone, Refused):
        return True
    return False


def _waits(commit: Commit, reason: str, *, until: datetime | None = None, tags: tuple[str, ...] = ()) -> Deferred:
    return Deferred(
        reason, commit.run, commit.step, id=commit.id, txid=commit.txid, until=until, tags=tags,
        replaced=_is_old(commit) or None,
    )  # fmt: skip


def _is_old(commit: Commit) -> bool:
    """Tell whether a commit is but places that a checkpoint had, or was to have: nobody has forgotten that."""
    return not (commit.visible or commit.is_forgotten)


def retire(repo: Repository, plan: GcPlan, done: RetireProgress) -> None:
    """Forget and purge what ``plan`` says. ``done``: empty yet.

    What somebody else changed or tagged since is left alone. Raises `StorageError`, `Unsupported` where the store
    demands of writers what this version does not know.
    """
    chosen = _untagged(repo, plan.forget)
    announce_all(repo, chosen)
    _each_unless_changed(repo, forget, chosen, done.forgotten)
    # again: a tag that was set meanwhile counts, and one set later sees what is done here
    tagged = _barred(repo, [*plan.purge, *done.forgotten])
    claimed = [commit for commit in done.forgotten if commit.txid in tagged]
    _each_unless_changed(repo, partial(restore, as_read=True), claimed, [])
    done.forgotten = [commit for commit in done.forgotten if commit.txid not in tagged]
    now = {commit.txid: commit for commit in (*plan.purge, *done.forgotten)}  # as this gc last saw them
    due = [now[commit.txid] for commit in plan.purge]
    settings = repo.settings  # again: the store may have got a mirror meanwhile, or demand more of writers
    records.check_requirements(settings, repo.storage.url)
    unsafe = _unsafe(repo, due, settings.mirror)
    left = [c for c in due if not c.visible and c.txid not in tagged and c.txid not in unsafe]
    announce_all(repo, left)
    _each_unless_changed(repo, purge, left, done.purged)


def forget_and_purge(repo: Repository, commits: Iterable[Commit]) -> list[Commit]:
    """Forget ``commits``, which are visible, and purge them, with no gc in between; what was forgotten.

    Where the settings of the store name a minimum age, the purge is left to a gc. What a tag names, or what is not safe
    in the store's mirror yet, stays as it is. Raises `StorageError`.
    """
    wanted, settings = list(commits), repo.settings
    records.check_requirements(settings, repo.storage.url)
    unsafe = {commit.txid for commit in unmirrored(repo, wanted, settings.mirror)}
    chosen = tuple(commit for commit in wanted if commit.txid not in unsafe)
    ages, done = min_age_of(repo, None, AT_ONCE), RetireProgress()
    plan = GcPlan(chosen, tuple(commit for commit in chosen if not ages.of(commit)), mirror=settings.mirror)
    retire(repo, unless_mirror_is_gone(repo, plan, near=True), done)
    return done.forgotten


def purge_now(repo: Repository, replaced: Iterable[TxId]) -> None:
    """Purge the places of checkpoints that were rewritten, with no gc in between, as `forget_and_purge` does."""
    commits, settings = list_commits(repo).commits, repo.settings
    ages = min_age_of(repo, None, AT_ONCE)
    old = [commits[txid] for txid in replaced if txid in commits and commits[txid].last == "replaced"]
    plan = GcPlan((), tuple(commit for commit in old if not ages.of(commit)), mirror=settings.mirror)
    retire(repo, unless_mirror_is_gone(repo, plan, near=True), RetireProgress())


def _untagged(repo: Repository, commits: Iterable[Commit]) -> list[Commit]:
    wanted = list(commits)
    tagged = _tagged(repo, wanted)
    return [commit for commit in wanted if commit.txid not in tagged]


def _tagged(repo: Repository, commits: Iterable[Commit]) -> set[TxId]:
    """Return which of ``commits`` a tag names that counts by the clock of this host, now."""
    wanted = list(commits)
    return tagged_txids(_tags_now(repo), wanted) if wanted else set()


def _tags_now(repo: Repository) -> dict[str, Tag]:
    return tags(repo, slack=FOREIGN_CLOCKS)


def _barred(repo: Repository, commits: Iterable[Commit]) -> set[TxId]:
    """Return which of ``commits``, which were read as forgotten before, no gc may purge for the tags that there are."""
    wanted = list(commits)
    found = _tags_now(repo) if wanted else {}
    if not tagged_txids(found, wanted):
        return set()
    listed = list_commits(repo)
    return _claimed(found, listed, wanted) - _free(listed, wanted)


def _claimed(found: Mapping[str, Tag], listed: CommitList, commits: Iterable[Commit]) -> set[TxId]:
    """Return which of ``commits`` a tag names that was not set on what they were rewritten to, with less in it."""

    def claims(tag: Tag, commit: Commit) -> bool:
        on = listed.commits.get(tag.txid)
        is_behind = on is not None and on.standing == STANDS and listed.is_rewrite_of(on, commit.txid)
        return not (is_behind and commit.last == "replaced")

    by_id = grouped(found.values(), lambda tag: tag.manifest)
    return {one.txid for one in commits if any(claims(tag, one) for tag in by_id.get(one.id, ()))}


def _free(listed: CommitList, commits: Iterable[Commit]) -> set[TxId]:
    """Return which of ``commits`` are gone from sight, and no tag need keep: all of the checkpoint is elsewhere.

    It is visible by another commit; or this one was rewritten without a loss; or it is a rewrite that is void.
    """
    seen = Holdings(listed.visible())
    return {
        one.txid
        for one in commits
        if not one.visible and (one in seen or one.standing == VOID or listed.standin(one) is not one)
    }


def _unsafe(repo: Repository, commits: Iterable[Commit], mirror: str | None, made: float = 0) -> set[TxId]:
    """Return which of ``commits`` are not safe in ``mirror`` yet: they, or what they were rewritten to without a loss.

    With any loss, where the settings say that it is thinned, too. A rewrite that is void need not be. ``made``: see
    `unmirrored`.
    """
    wanted = [commit for commit in commits if commit.standing != VOID]
    if mirror is None or not wanted:
        return set()
    listed = list_commits(repo)
    loses = bool(repo.settings.mirror_thinned)
    standins = {commit.txid: listed.standin(commit, loses=loses) for commit in wanted}
    behind = {commit.txid for commit in unmirrored(repo, standins.values(), mirror, made)}
    return {txid for txid, one in standins.items() if one.txid in behind}


def _end(found: Iterable[Tag]) -> datetime | None:
    """Return when a gc need no longer heed these tags; None if one of them never ends."""
    ends = [tag.expires for tag in found]
    known = [end + FOREIGN_CLOCKS for end in ends if end is not None]
    return time_of(max(known)) if known and len(known) == len(ends) else None


def _each_unless_changed(
    repo: Repository, action: Callable[[Repository, Commit], Commit], commits: Iterable[Commit], done: list[Commit]
) -> None:
    """Call ``action`` on each, and add to ``done``; leave out those whose log somebody else went on with."""

    def attempt(commit: Commit) -> None:
        with suppress(Conflict):
            done.append(action(repo, commit))

    try:
        for _ in in_parallel(repo.storage.traits.requests, attempt, commits):
            pass
    finally:
        done.sort(key=lambda commit: commit.order)  # threads have added them as they came
