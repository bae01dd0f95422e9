"""References: the strings that name a checkpoint, and the commits to which they refer.

::

    <id>            an id, or a unique prefix of at least 6 hex digits; also works for forgotten checkpoints
    RUN@STEP        the visible checkpoint of the step; if there are several, the one that was saved last
    RUN@latest      the newest save of the run, so a run that was rolled back resumes at its current position
    latest          the newest save of all runs
    tag:NAME        the checkpoint that the tag names
    RUN@100..500    all steps from 100 to 500, inclusive (where several checkpoints are allowed)
    RUN@501..       all steps from 501; RUN@..500: all steps up to 500; RUN@..: all steps of the run
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from casckpt.base.names import ID, LATEST, MAX_STEP, TAG, check_run, run_hash, similar
from casckpt.base.text import few
from casckpt.base.units import time_of
from casckpt.errors import Damaged, Gone, InvalidInput, NotFound, Refused
from casckpt.format.keys import parse_txid
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import Committed
from casckpt.history.commits import Commit, CommitList, list_commits, read_log
from casckpt.history.ended import is_list
from casckpt.history.following import at_step, is_visible, look_at_all, newest, newest_of_runs
from casckpt.history.tags import get_tag, named_by, no_tag
from casckpt.repository.processes import saving_here
from casckpt.repository.repository import Repository

GRAMMAR = (
    "use an id or at least 6 hex digits of one, RUN@STEP, RUN@latest, latest or tag:NAME "
    "(and RUN@100..500, RUN@501.., RUN@..500 or RUN@.. where several are allowed)"
)

_STEP = re.compile(r"[0-9]{1,19}")
_RANGE = re.compile(r"([0-9]{1,19})?\.\.([0-9]{1,19})?")
_SHOWN = 5


def resolve(repo: Repository, ref: str | Commit, commits: CommitList | None = None) -> Commit:
    """Return the commit that ``ref`` names. If ``ref`` is a commit, return its current state.

    ``commits``: the listing to search. None makes a new listing. Raises `InvalidInput` if ``ref`` is not a reference
    or is ambiguous, `NotFound` with similar names that exist, `Gone` for a purged checkpoint, and `StorageError`.
    """
    if isinstance(ref, Commit):
        now = _by_its_log(repo, ref) if commits is None else None
        return now or _as_it_is(repo, list_commits(repo) if commits is None else commits, ref)
    run, at, where = _text(ref).rpartition("@")
    if commits is None and not ref.startswith(TAG) and (at or ref == LATEST):
        followed = _followed(repo, check_run(run) if at else None, where)
        if followed is not None:
            return followed
    listed = list_commits(repo) if commits is None else commits
    if ref.startswith(TAG):
        return _tagged(repo, listed, ref.removeprefix(TAG))
    if at:
        return _of_run(repo, listed, check_run(run), where)
    if ref == LATEST:
        return _newest(repo, listed)
    if ID.fullmatch(ref.lower()):
        return _by_id(repo, listed, ref.lower())
    raise InvalidInput(f"{ref!r} does not name a checkpoint: {GRAMMAR}")


def is_range(ref: object) -> bool:
    """Return whether a reference is a range of steps."""
    return isinstance(ref, str) and _RANGE.fullmatch(ref.rpartition("@")[2]) is not None


def resolve_many(repo: Repository, refs: Iterable[str | Commit], commits: CommitList | None = None) -> list[Commit]:
    """Return the commits that ``refs`` name, including ranges. Each commit is returned once.

    The commits of a range are in step order.
    """
    listed = list_commits(repo) if commits is None else commits
    named: dict[str, Commit] = {}
    for ref in refs:
        chosen = (not isinstance(ref, Commit) and _range(repo, listed, ref)) or [resolve(repo, ref, listed)]
        named.update({commit.txid: commit for commit in chosen})
    return list(named.values())


def unread_within(listed: CommitList, refs: Iterable[str | Commit], run: str | None = None) -> list[TxId]:
    """Return the transactions with an unreadable record that the ranges in ``refs`` may refer to.

    If ``refs`` is empty, return all transactions with an unreadable record. ``run``: return only those of this
    run, or, for a pattern, of any run, because a record that cannot be read does not tell its run.
    """
    named = list(refs)
    texts = [ref for ref in named if not isinstance(ref, Commit)]
    ranges = [(run_hash(ref.rpartition("@")[0]), steps) for ref in texts if (steps := _steps_of(ref)) is not None]
    of_run = None if run is None or any(one in run for one in "*?[") else run_hash(run)

    def may_be(txid: TxId) -> bool:
        if is_list(txid):
            return False  # it names only checkpoints that are gone
        name = parse_txid(txid)
        is_named = any(name.step in steps for of, steps in ranges if of == name.run_hash)
        return (is_named or not named) and of_run in (None, name.run_hash)

    return sorted(filter(may_be, listed.damaged))


def resolve_forgotten(repo: Repository, ref: str | Commit, commits: CommitList) -> list[Commit]:
    """Return the commits that ``ref`` names for a restore. RUN@STEP and ranges refer to forgotten checkpoints.

    A range refers to all steps without a visible checkpoint. Raises the errors of `resolve`. If several checkpoints
    were forgotten at one step, raises `InvalidInput` with the ids to choose from.
    """
    if isinstance(ref, Commit):
        return [resolve(repo, ref, commits)]
    run, _, where = _text(ref).rpartition("@")
    if (steps := _steps_of(ref)) is not None:
        forgotten = _forgotten(commits, run, steps)
        if not forgotten:
            is_known = any(commit.run == run for commit in commits.live())
            why = f"in {where}, run {run!r} in {repo.storage.url} has no step whose only checkpoints are forgotten"
            raise NotFound(f"{why}{_doubt(commits)}" if is_known else about_run(repo, commits, run))
        return forgotten
    if run and _STEP.fullmatch(where) and commits.at(run, int(where)) is None:
        return _forgotten(commits, run, range(int(where), int(where) + 1)) or [resolve(repo, ref, commits)]
    return [resolve(repo, ref, commits)]


def _forgotten(commits: CommitList, run: str, steps: range) -> list[Commit]:
    """Return the forgotten checkpoints of steps without a visible checkpoint, in step order."""
    at: dict[int, dict[ManifestId, Commit]] = defaultdict(dict)
    for commit in commits.live():
        if commit.is_forgotten and commit.run == run and commit.step in steps and commits.at(run, commit.step) is None:
            at[commit.step][commit.id] = commit  # if an id has several commits, the last one is used
    for step, ids in at.items():
        if len(ids) > 1:
            dated = ((commit.id[:16], time_of(commit.committed.created_at)) for commit in ids.values())
            named = few([f"{id} (of {time:%Y-%m-%d %H:%M:%S} UTC)" for id, time in dated], _SHOWN)
            raise InvalidInput(f"{len(ids)} checkpoints of {run}@{step} were forgotten: {named}; choose one by its id")
    return [commit for step in sorted(at) for commit in at[step].values()]


def _followed(repo: Repository, run: str | None, where: str) -> Commit | None:
    """Find a visible commit by means of announcements: the newest of all runs, or one of ``run``.

    Return None if the announcements do not lead to one. The caller then makes a listing, and reports what exists
    instead.
    """
    try:
        if run is None:
            return next(iter(newest_of_runs(repo, is_visible)), None)
        if where == LATEST:
            return newest(repo, run, is_visible)
        if not _STEP.fullmatch(where):
            return None
        return next(reversed(at_step(repo, look_at_all(repo, run), run, int(where), is_visible)), None)
    except (Damaged, Refused):
        return None


def _by_its_log(repo: Repository, commit: Commit) -> Commit | None:
    """Return the current state of a commit, with two parallel requests.

    Return None if its own log does not show the state.
    """
    try:
        now = read_log(repo, commit.txid)
    except (Damaged, Refused):
        return None
    return now if now is not None and now.live and now.id == commit.id else None


def _as_it_is(repo: Repository, listed: CommitList, commit: Commit) -> Commit:
    known = listed.commits.get(commit.txid)
    is_same = known is not None and isinstance(known.first, Committed) and known.id == commit.id
    same = known if is_same else None  # None if it belongs to a different store, or if its record has been forged
    if commit.txid in listed.damaged:
        return same or commit
    now = same or _by_id(repo, listed, commit.id)
    if now.live:
        return now
    other = listed.of_id(now.id)  # it was copied back
    if other is not None and (other.run, other.step) != (now.run, now.step):
        raise Refused(
            f"the commit records of {other} and {now} name the same id: one of them is wrong", checkpoints=(now.id,)
        )
    if other is None or not other.visible:
        raise Gone(f"{now} was purged: it is gone for good; see `casckpt list`", checkpoints=(now.id,))
    return other


def _text(ref: object) -> str:
    if not isinstance(ref, str):
        kind = type(ref).__name__  # not its repr: that of a large state takes minutes
        raise InvalidInput(f"a reference must be a str, and not of type {kind}: {GRAMMAR}")
    if ref.startswith("@"):
        raise InvalidInput(f"{ref!r} names no run: {GRAMMAR}")
    return ref


def _steps_of(ref: str) -> range | None:
    """Return the steps that ``ref`` names, or None if it is not a range."""
    run, _, where = ref.rpartition("@")
    parts = _RANGE.fullmatch(where)
    if not parts:
        return None
    check_run(run)
    low, high = int(parts[1] or 0), int(parts[2] or MAX_STEP)
    if low > high:
        raise InvalidInput(f"{ref!r} does not name any step: {low} is greater than {high}")
    return range(low, high + 1)


def _range(repo: Repository, listed: CommitList, ref: str) -> list[Commit]:
    """Return the commits in a range of steps, or [] if ``ref`` is not a range."""
    steps = _steps_of(_text(ref))
    if steps is None:
        return []
    run, _, where = ref.rpartition("@")
    commits = _commits_of_run(repo, listed, run)
    within = [commit for commit in commits if commit.step in steps]
    if not within:
        raise _no_step(repo, listed, commits, f"step in {where}")
    return sorted(within, key=lambda commit: commit.step)


def _of_run(repo: Repository, listed: CommitList, run: str, where: str) -> Commit:
    if where != LATEST and not _STEP.fullmatch(where):
        more = "a range names several" if _RANGE.fullmatch(where) else GRAMMAR
        raise InvalidInput(f"'{run}@{where}' does not name one checkpoint: {more}")
    if where == LATEST:
        return _commits_of_run(repo, listed, run)[-1]
    return _at_step(repo, listed, run, int(where))


def _at_step(repo: Repository, listed: CommitList, run: str, step: int) -> Commit:
    hits = [commit for commit in listed.live() if (commit.run, commit.step) == (run, step)]
    visible = [commit for commit in hits if commit.visible]
    if visible:
        return visible[-1]
    if hits:
        message = f"{run}@{step} in {repo.storage.url} was forgotten; its id is {hits[-1].id}"
        raise NotFound(f"{message}; `casckpt restore STORE {hits[-1].id[:16]}` makes it visible again")
    purged = [c for c in listed.commits.values() if c.last == "purged" and (c.run, c.step) == (run, step)]
    if purged:
        why = f"checkpoint {purged[-1]} was purged: it is gone for good; see `casckpt list`"
        raise Gone(why, checkpoints=(purged[-1].id,))
    raise _no_step(repo, listed, _commits_of_run(repo, listed, run), f"step {step}")


def _commits_of_run(repo: Repository, listed: CommitList, run: str) -> list[Commit]:
    """Return the visible commits of a run, oldest first. Raises NotFound if there is none."""
    commits = [commit for commit in listed.current() if commit.run == run]
    if commits:
        return commits
    raise NotFound(about_run(repo, listed, run))


def about_run(repo: Repository, listed: CommitList, run: str) -> str:
    """Return a message about a run that has no visible checkpoint.

    It says whether the run ever had one, and which runs exist.
    """
    forgotten = sum(commit.run == run for commit in listed.live())
    runs = listed.runs()
    near = similar(run, runs)
    if forgotten:
        there = f"{forgotten} {'were' if forgotten > 1 else 'was'} forgotten: see `casckpt list --all`"
    elif near:
        there = f"did you mean {few(near, _SHOWN)}?"
    else:
        there = f"existing runs: {few(runs, _SHOWN)}" if runs else "the store has no visible checkpoints"
    return (
        f"there is no checkpoint of run {run!r} in {repo.storage.url}; {there}{_doubt(listed)}{saved_soon(repo, run)}"
    )


def saved_soon(repo: Repository, run: str) -> str:
    """Return a sentence if this process still runs a save of ``run`` in the background; else an empty string."""
    steps = [step for url, name, step in tuple(saving_here) if (url, name) == (repo.storage.url, run)]
    at = f"{run}@{max(steps, default=0)}"
    return f". The save of {at} still runs in the background: wait for its future, and use the result" if steps else ""


def _no_step(repo: Repository, listed: CommitList, commits: Sequence[Commit], what: str) -> NotFound:
    newest = commits[-1]
    steps = sorted(commit.step for commit in commits)
    there = f"the newest is {newest.run}@{newest.step}, and the steps range from {steps[0]} to {steps[-1]}"
    return NotFound(
        f"run {newest.run!r} in {repo.storage.url} has no {what}; {there}{_doubt(listed)}{saved_soon(repo, newest.run)}"
    )


def _newest(repo: Repository, listed: CommitList) -> Commit:
    commits = listed.current()
    if not commits:
        raise NotFound(f"there is no visible checkpoint in {repo.storage.url}; save one first{_doubt(listed)}")
    return commits[-1]


def _by_id(repo: Repository, listed: CommitList, prefix: str) -> Commit:
    """Return the commit to which an id or id prefix refers."""
    hits = [commit for commit in listed.live() if commit.id.startswith(prefix)]
    ids = sorted({commit.id for commit in hits})
    if len(ids) > 1:
        first = {commit.id: commit for commit in reversed(hits)}
        names = few([f"{id[:16]} ({first[id].run}@{first[id].step})" for id in ids], _SHOWN)
        raise InvalidInput(f"{prefix!r} is a prefix of {len(ids)} ids: {names}; use more digits")
    if hits:
        return _meant(repo, sorted(hits, key=lambda commit: commit.rank, reverse=True))
    purged = [c for c in listed.commits.values() if c.last == "purged" and c.id.startswith(prefix)]
    if purged:
        why = f"checkpoint {purged[-1]} was purged: it is gone for good; see `casckpt list`"
        raise Gone(why, checkpoints=(purged[-1].id,))
    there = f"did you mean {prefix}@{LATEST}?" if prefix in listed.runs() else "see `casckpt list --all`"
    raise NotFound(f"there is no checkpoint {prefix} in {repo.storage.url}; {there}{_doubt(listed)}")


def _meant(repo: Repository, hits: Sequence[Commit]) -> Commit:
    """Return the first commit of an id. If the commits' records differ, return the first with a matching manifest."""
    if len({(commit.run, commit.step) for commit in hits}) > 1:  # an id belongs to a single run and step
        from casckpt.contents import manifests  # imported here, because it needs numpy, and few references need it

        for commit in hits:
            with suppress(Damaged, Refused, Gone):
                manifests.get(repo, commit)
                return commit
    return hits[0]


def _tagged(repo: Repository, listed: CommitList, name: str) -> Commit:
    tag = get_tag(repo, name)
    if tag is None:
        raise no_tag(repo, name)
    commit = named_by(tag, listed)
    if commit is None:
        raise NotFound(f"tag {name!r} names {tag.manifest[:12]}, which is not in {repo.storage.url}{_doubt(listed)}")
    if not commit.visible:
        what = f"{commit}, which was {commit.last}"
        more = f"; `casckpt restore STORE {commit.id}` makes it visible again" if commit.live else "; move the tag"
        raise NotFound(f"tag {name!r} names {what}{more}")
    return commit


def _doubt(listed: CommitList) -> str:
    count = len(listed.damaged)
    refused = next((f", as {error}" for error in listed.damaged.values() if isinstance(error, Refused)), "")
    return f" ({count} commit records cannot be read: see `casckpt verify`{refused})" if count else ""
