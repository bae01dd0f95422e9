"""Commits: the numbered log of each transaction in commits/, folded; and the only ways to add to it.

A rewrite is a commit that holds the checkpoint of another one, its base, at other places. It stands from the instant in
which the record of the base that it has chosen says `replaced` by it, until a `restored` behind that takes it back;
for ever, if the base is purged. Once that record holds something else, or was taken back, or the base is void, it is
void for ever. So what a rewrite is stands in the log of its base, and in that of the base of that.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused, Revoked
from casckpt.format import records
from casckpt.format.keys import commit_key, parse_log
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import (
    Committed,
    Dropped,
    FirstRecord,
    Forgotten,
    Kept,
    LaterRecord,
    Purged,
    Replaced,
    Restored,
)
from casckpt.lazy import cached_property
from casckpt.parallel import in_parallel
from casckpt.repository.caches import Shown, shown
from casckpt.repository.reading import Read, key_of, read_records
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.repository.runs.announcements import announce
from casckpt.storage.base import ListedObject

PREFIX = "commits/"
LaterKind: TypeAlias = type[Forgotten] | type[Restored] | type[Purged]

Folded: TypeAlias = tuple[Mapping[str, Shown], "CommitList"]
"""What a listing showed of each key, and what all of its records say together."""

_NOT_WHAT_IT_WAS = (
    "the store at %s is not what it was: it has no %s any more, so it was put back from a copy, or lost records. What "
    "this host knew of it counts no more"
)
_STATES: dict[type, str] = {
    Committed: "committed",
    records.RevokedRecord: "revoked",
    Forgotten: "forgotten",
    Restored: "restored",
    Purged: "purged",
    Replaced: "replaced",
}
_AFTER = {
    "forgotten": ("committed", "restored"),
    "restored": ("forgotten", "replaced"),
    "purged": ("forgotten", "replaced"),
}
STANDS, UNSETTLED, VOID = "stands", "unsettled", "void"
"""Of a commit that is no rewrite, the first. A rewrite is unsettled until anything holds the record that it chose."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """One transaction's log in commits/, folded.

    ``last``: "committed", "revoked", "forgotten", "restored", "replaced" or "purged". ``number``: the highest one of
    the log. ``changed_at``: time of the last record, in microseconds since the epoch. A `kept` record only takes a
    number. ``restored``: number of the last `restored` record, 0 for none; what is not listed, or cannot
    be read, counts as one. ``replaced``: number of a `replaced` record that no `restored` has taken back, and by which
    transaction. ``unread``: numbers of what is not listed, or cannot be read. ``standing``: `STANDS`, `UNSETTLED`,
    `VOID`; by the logs of what it replaces.
    """

    txid: TxId
    first: FirstRecord
    last: str
    number: int
    changed_at: int
    restored: int = 0
    replaced: tuple[int, TxId] | None = None
    unread: tuple[int, ...] = ()
    standing: str = STANDS

    @property
    def live(self) -> bool:
        """Committed and not purged."""
        return self.last not in ("revoked", "purged")

    @property
    def answers(self) -> bool:
        """It is what its id means: it stands, and was not replaced."""
        return self.standing == STANDS and self.last != "replaced"

    @property
    def visible(self) -> bool:
        """Live, not forgotten, and what its id means."""
        return self.last in ("committed", "restored") and self.standing == STANDS

    @property
    def is_forgotten(self) -> bool:
        """Out of sight because somebody said so."""
        return self.last == "forgotten" and self.standing == STANDS

    @property
    def replaces(self) -> tuple[TxId, int] | None:
        """The transaction of which it is a rewrite, and the number of the record that is to say so; None for none."""
        return self.first.replaces if isinstance(self.first, Committed) else None

    @property
    def dropped(self) -> Dropped | None:
        """What it lacks of the first save; None for nothing."""
        return self.first.dropped if isinstance(self.first, Committed) else None

    @property
    def origin(self) -> TxId:
        """The transaction of the first save, which tells which of two checkpoints is newer."""
        return (self.first.origin if isinstance(self.first, Committed) else None) or self.txid

    @property
    def order(self) -> tuple[TxId, bool, bool, bool, TxId]:
        """What sorts commits, oldest first; of several of one save the one that answers comes last."""
        return self.origin, *self.rank

    @property
    def rank(self) -> tuple[bool, bool, bool, TxId]:
        """What sorts commits of one id: what the id means comes last."""
        return self.visible, self.answers, self.dropped is None, self.txid

    @property
    def committed(self) -> Committed:
        """The first record. Raises `Revoked` for a transaction that was revoked."""
        if isinstance(self.first, Committed):
            return self.first
        raise Revoked(f"transaction {self.txid} was revoked ({self.first.reason}): there is no checkpoint of it")

    @property
    def id(self) -> ManifestId:
        """The checkpoint's id."""
        return self.committed.manifest

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.committed.run

    @property
    def step(self) -> int:
        """Step of the run."""
        return self.committed.step

    def __str__(self) -> str:
        return f"{self.run}@{self.step} ({self.id[:12]})" if isinstance(self.first, Committed) else self.txid

    def __repr__(self) -> str:
        return f"<Commit {self}, {self.last}>"


def just_committed(record: Committed) -> Commit:
    """Return what a log says that holds ``record`` alone."""
    standing = STANDS if record.replaces is None else UNSETTLED
    return Commit(record.txid, record, "committed", 0, record.time, standing=standing)


@dataclass(frozen=True)
class CommitList:
    """A snapshot made by one LIST of commits/.

    ``commits``: committed ones and revoked ones. ``damaged``: transactions of which the first or the last record
    cannot be read, and why. Of those, one whose first record can be read stands in ``commits`` too, in the last state
    that can be read. gc deletes nothing while there are any.
    """

    commits: Mapping[TxId, Commit]
    damaged: Mapping[TxId, CasckptError]

    def live(self) -> list[Commit]:
        """Return live ones, oldest first."""
        return [commit for commit in self._sorted if commit.live]

    def standing(self) -> list[Commit]:
        """Return live ones but for rewrites that do not stand, oldest first."""
        return [commit for commit in self._sorted if commit.live and commit.standing == STANDS]

    def visible(self) -> list[Commit]:
        """Return visible ones, oldest first."""
        return [commit for commit in self._sorted if commit.visible]

    def current(self) -> list[Commit]:
        """Return visible ones that answer to their run and step, oldest first: of twins the one saved last."""
        return list(self._current)

    def superseded(self) -> list[Commit]:
        """Return visible ones of which a later twin (same run and step) is visible, oldest first."""
        answers = {commit.txid for commit in self._current}
        return [commit for commit in self.visible() if commit.txid not in answers]

    def newest_live(self, run: str) -> Commit | None:
        """Return the live one of ``run`` that was saved last, forgotten or not; never one whose state is in doubt."""
        known = (commit for commit in reversed(self._sorted) if commit.txid not in self.damaged)
        return next((commit for commit in known if commit.live and commit.run == run), None)

    def runs(self) -> list[str]:
        """Return the names of the runs that have a visible checkpoint, sorted."""
        return sorted({commit.run for commit in self._current})

    def of_id(self, id: ManifestId) -> Commit | None:
        """Return what an id means: of its live commits the visible one, else the one that answers; None without any."""
        return max((one for one in self.live() if one.id == id), key=lambda one: one.rank, default=None)

    def standin(self, commit: Commit) -> Commit:
        """Return what has replaced ``commit`` in the end, and has all that it has; itself where nothing has."""
        while commit.replaced is not None:
            other = self.commits.get(commit.replaced[1])
            if other is None or commit not in Holdings([other]):
                break
            commit = other
        return commit

    def needed(self) -> list[Commit]:
        """Return live ones that nothing stands in for, oldest first: whose loss would be one."""
        return [commit for commit in self.standing() if self.standin(commit) is commit]

    def is_rewrite_of(self, commit: Commit | None, txid: TxId) -> bool:
        """Tell whether ``commit`` is a rewrite of the transaction, or of one of its rewrites."""
        while commit is not None and commit.replaces is not None:
            if commit.replaces[0] == txid:
                return True
            commit = self.commits.get(commit.replaces[0])
        return False

    @cached_property
    def _sorted(self) -> list[Commit]:
        found = [self.commits[txid] for txid in sorted(self.commits)]
        is_plain = all(commit.origin == commit.txid for commit in found)  # as mostly; else to sort them takes long
        return found if is_plain else sorted(found, key=lambda commit: commit.order)

    @cached_property
    def _current(self) -> list[Commit]:
        latest = {(commit.run, commit.step): commit.txid for commit in self.visible()}
        return [commit for commit in self.visible() if latest[commit.run, commit.step] == commit.txid]


class Holdings:
    """What some commits hold: a commit is in it if one of them has the same id, and lacks nothing that it has."""

    def __init__(self, commits: Iterable[Commit]) -> None:
        self._held = {(commit.id, commit.dropped) for commit in commits}

    def __contains__(self, commit: Commit) -> bool:
        return not self._held.isdisjoint({(commit.id, None), (commit.id, commit.dropped)})


def list_commits(repo: Repository, *, anew: bool = False) -> CommitList:
    """Return all transactions that ended: one LIST, and a read of each record that the catalogue lacks.

    ``anew``: read every record, also those that the catalogue has. Raises `NotFound` where there is no store,
    `StorageError`.
    """
    last: Folded | None = None if anew else repo.records.folded
    before, listed = last or ({}, CommitList({}, {}))
    seen = _seen(repo, before)
    now = {entry.key: shown(entry) for entry in repo.storage.list(PREFIX, known=parse_log)}
    touched = _touched(before, now)
    if last and not touched:
        return listed
    if not seen <= now.keys():
        log.warning(_NOT_WHAT_IT_WAS, repo.storage.url, min(seen - now.keys()))
        repo.forget_all(keep_marker=not now)
        return list_commits(repo, anew=anew)
    logs = _read_logs(repo, _entries(now, touched), anew=anew)
    _add_linked(repo, listed, logs)
    listed = _look_again(repo, _with_logs(listed, logs), logs)
    if not listed.damaged and all(commit_key(txid) in now and _is_whole(log) for txid, log in logs.items()):
        repo.records.folded = (now, listed)  # else the next listing reads again what this one could not
    return listed


def _seen(repo: Repository, before: Mapping[str, Shown]) -> set[str]:
    """Return the keys in commits/ that this process or its host has seen. Ask before a listing: others go on learning.

    None ever goes: where one is missing, the store was put back from a copy, or lost it, or is another in its place.
    """
    own = {repo.last_commit} if repo.last_commit else set()
    if before:
        return own | before.keys()
    return own | {key_of(row) for row in repo.catalogue.keys(PREFIX)}


def list_names(repo: Repository) -> set[TxId]:
    """Return the ids of all transactions that ended: one LIST, no reads. Raises `StorageError`."""
    return {name[0] for entry in repo.storage.list(PREFIX, known=parse_log) if (name := parse_log(entry.key))}


def read_log(repo: Repository, txid: TxId) -> Commit | None:
    """Return what a transaction's log says now, read by its keys; None where it has no record.

    As good as a listing of commits/ that begins now. Raises `Damaged` or `Refused` as `refresh`, `StorageError`.
    """
    keys = [(commit_key(txid), FirstRecord), (commit_key(txid, 1), LaterRecord)]
    first, second = in_parallel(repo.storage.traits.requests, lambda key: _record(repo, txid, *key), keys)
    if isinstance(first, NotFound):
        return None
    if isinstance(first, CasckptError):
        raise first
    commit = _folded(txid, {0: first})
    is_all = commit is None or (isinstance(second, NotFound) and commit.replaces is None)
    return commit if commit is None or is_all else refresh(repo, commit)


def _record(repo: Repository, txid: TxId, key: str, kind: Any) -> Read:
    try:
        return _checked(repo.get_record(key, kind), txid, key)
    except (NotFound, Damaged, Refused) as error:
        return error


def refresh(repo: Repository, commit: Commit) -> Commit:
    """Return the commit as its log is now. Reads the records behind the one that ``commit`` knows.

    Of a rewrite the log of its base, too. Raises `Damaged` or `Refused` if the last one cannot be read, `StorageError`.
    """
    commit = _refreshed(repo, commit)
    if commit.replaces is None or commit.standing == VOID:
        return commit
    commit, doubt = _judged(commit, read_log(repo, commit.replaces[0]))
    if doubt is not None:
        raise doubt
    return commit


def _refreshed(repo: Repository, commit: Commit) -> Commit:
    log: dict[int, Read] = {0: commit.first}
    number = commit.number
    while True:
        key = commit_key(commit.txid, number + 1)
        try:
            log[number + 1] = _checked(repo.get_record(key, LaterRecord), commit.txid, key)
        except (Damaged, Refused) as error:
            log[number + 1] = error
        except NotFound:
            break
        number += 1
    if number == commit.number:
        return commit
    if all(isinstance(record, Kept) for of, record in log.items() if of):
        return replace(commit, number=number)
    doubt = _doubt(log)
    if doubt is not None:
        raise doubt
    return _folded(commit.txid, log, commit) or commit


def follow(repo: Repository, commit: Commit) -> Commit:
    """Return what has replaced ``commit`` in the end, as logs read now have it; itself where nothing has.

    Where that is not visible, so it was at one instant: else what never was gone could seem to be. Raises as `refresh`.
    """
    chain = [commit]
    while (link := chain[-1].replaced) is not None and (other := read_log(repo, link[1])) is not None:
        chain.append(other)
    if chain[-1].visible or [refresh(repo, one) for one in chain] == chain:
        return chain[-1]
    return follow(repo, refresh(repo, commit))


def commit(repo: Repository, record: Committed, *, seen: int | None = None) -> None:
    """Make a checkpoint visible: announce it, and create commits/<txid>. Its own record, put before, is success.

    A rewrite is not visible by that; the record that makes it so is announced, too.

    ``seen``: see `casckpt.repository.runs.announcements.announce`. Raises `Revoked` if the transaction was revoked,
    `Conflict` if something else has its name, `StorageError` if the storage does not say: then the commit may still
    happen, until `casckpt.repository.transactions.revoke` wins.
    """
    key = commit_key(record.txid)
    replaced = [] if record.replaces is None else [record.replaces]
    announce(repo, [(record.txid, 0), *replaced], seen=seen)
    try:
        repo.put_record(key, record)
    except Conflict:
        found = repo.get_record(key, FirstRecord)
        if isinstance(found, records.RevokedRecord):
            message = (
                f"the save of {record.run}@{record.step} was given up on before it ended ({found.reason}): "
                "a gc took it for dead, or it was aborted. Nothing of it is visible; save again"
            )
            raise Revoked(message, key=key) from None
        raise
    repo.last_commit = key
    for listener in repo.listeners:
        listener()


def append(repo: Repository, commit: Commit, kind: LaterKind) -> Commit:
    """Announce and add a record of ``kind``, and return the commit as it is then; as it is, if it is in that state.

    Of several that append at once exactly one wins. Raises `Conflict` if the log does not allow it, or if somebody
    else was first with another record; `StorageError`.
    """
    wanted = _STATES[kind]
    _check_standing(commit, wanted)
    if _holds(commit, wanted):
        commit = refresh(repo, commit)
        if _holds(commit, wanted):
            return commit
    _check_allowed(commit, wanted)
    record, number = kind(txid=commit.txid, time=repo.clock()), commit.number + 1
    announce(repo, [(commit.txid, number)])
    try:
        repo.put_record(commit_key(commit.txid, number), record)
    except Conflict:
        now = refresh(repo, commit)
        if _holds(now, wanted):
            return now
        if (now.last, now.restored) == (commit.last, commit.restored):  # the number was taken, and no more
            return append(repo, now, kind)
        message = f"{commit} was {now.last} by somebody else just now, so it was not {wanted}; look again"
        raise Conflict(message, checkpoints=(commit.id,)) from None
    commit = replace(commit, last=wanted, number=number, changed_at=record.time)
    return replace(commit, restored=number, replaced=None) if kind is Restored else commit


def forget(repo: Repository, commit: Commit) -> Commit:
    """Make a checkpoint invisible, until it is restored or purged. A forgotten one is returned as it is.

    Raises `Conflict` if it was purged, `StorageError`.
    """
    return append(repo, commit, Forgotten)


def restore(repo: Repository, commit: Commit) -> Commit:
    """Make a forgotten checkpoint visible again, or one that was replaced. A visible one is returned as it is.

    Raises `Conflict` if it was purged, or if another checkpoint of its run and step is visible; `StorageError`.
    """
    check_requirements(repo)
    found = list_commits(repo)
    commit = found.commits.get(commit.txid, commit)
    if commit.last in _AFTER["restored"]:
        place = (commit.run, commit.step)
        twin = next((other for other in found.current() if (other.run, other.step) == place), None)
        if twin is not None and not found.is_rewrite_of(twin, commit.txid):
            message = f"{commit} was not restored: {twin} is visible under the same run and step. Forget that one first"
            raise Conflict(message, checkpoints=(commit.id, twin.id))
    return append(repo, commit, Restored)


def purge(repo: Repository, commit: Commit) -> Commit:
    """End a forgotten checkpoint, or one that was replaced: from now on gc may delete its bytes.

    A purged one is returned as it is. Raises `Conflict` if it is neither, `StorageError`.
    """
    return append(repo, commit, Purged)


def announce_all(repo: Repository, commits: Iterable[Commit]) -> None:
    """Announce at once what `append` is about to add to each log. Raises `StorageError`."""
    announce(repo, [(commit.txid, commit.number + 1) for commit in commits])


def keep(repo: Repository, txid: TxId, number: int) -> bool:
    """Take a number that was announced and never came: whoever may come yet finds it taken. False if it is by now.

    Safe at any time. Raises `StorageError`.
    """
    try:
        repo.put_record(commit_key(txid, number), Kept(txid=txid, time=repo.clock()))
    except Conflict:
        return False
    return True


def purge_unreadable(repo: Repository, txid: TxId) -> None:
    """End a transaction of which no first record can be read, so that gc works again.

    Raises `Conflict` if somebody else adds to its log at this instant, `StorageError`.
    """
    logs = (parse_log(entry.key) for entry in repo.storage.list(PREFIX, known=parse_log))
    number = max((log[1] for log in logs if log and log[0] == txid), default=0)
    announce(repo, [(txid, number + 1)])
    repo.put_record(commit_key(txid, number + 1), Purged(txid=txid, time=repo.clock()))


def _touched(before: Mapping[str, Shown], now: Mapping[str, Shown]) -> set[TxId]:
    """Return the transactions whose records are not those that an earlier listing showed. Of ten thousand, few are."""
    keys = {key for key, found in now.items() if before.get(key) != found} | (before.keys() - now.keys())
    return {name[0] for key in keys if (name := parse_log(key))}


def _entries(listed: Mapping[str, Shown], touched: Collection[TxId]) -> dict[ListedObject, tuple[TxId, int]]:
    """Return all records of the transactions, by what was listed of them; also lower ones, where those were not."""
    names = {
        ListedObject(key, *found): name
        for key, found in listed.items()
        if key[len(PREFIX) :].partition(".")[0] in touched and (name := parse_log(key))
    }
    for txid, highest in list(names.values()):
        for number in range(highest):
            if (key := commit_key(txid, number)) not in listed:  # put while the listing ran, or gone
                names[ListedObject(key, -1)] = (txid, number)
    return names


def _read_logs(
    repo: Repository, names: Mapping[ListedObject, tuple[TxId, int]], *, anew: bool
) -> dict[TxId, dict[int, Read]]:
    logs: dict[TxId, dict[int, Read]] = defaultdict(dict)
    found = read_records(repo, PREFIX, names, _kind, anew=anew)
    for entry, (txid, number) in names.items():
        if not (number and entry.size < 0 and isinstance(found[entry.key], NotFound)):
            logs[txid][number] = _checked(found[entry.key], txid, entry.key)
    return logs


def _add_linked(repo: Repository, listed: CommitList, logs: dict[TxId, dict[int, Read]]) -> None:
    """Add the logs that those in ``logs`` speak of, and that the listing lacks: they were put while it ran, or gone."""
    while True:
        told = [record for log in logs.values() for record in log.values()]
        wanted = {record.by for record in told if isinstance(record, Replaced)}
        wanted |= {record.replaces[0] for record in told if isinstance(record, Committed) and record.replaces}
        wanted -= logs.keys() | listed.commits.keys()
        if not wanted:
            return
        logs.update({txid: _log_by_key(repo, txid) for txid in sorted(wanted)})


def _log_by_key(repo: Repository, txid: TxId) -> dict[int, Read]:
    log = {0: _record(repo, txid, commit_key(txid), FirstRecord)}
    while not isinstance(found := _record(repo, txid, commit_key(txid, len(log)), LaterRecord), NotFound):
        log[len(log)] = found
    return log


def _with_logs(listed: CommitList, logs: Mapping[TxId, Mapping[int, Read]]) -> CommitList:
    """Return the list, with what ``logs`` say of their transactions."""
    commits = {txid: commit for txid, commit in listed.commits.items() if txid not in logs}
    commits |= {txid: commit for txid, log in logs.items() if (commit := _folded(txid, log))}
    doubts = {txid: error for txid, log in logs.items() if (error := _doubt(log))}
    return _all_judged(commits, doubts)


def _all_judged(commits: dict[TxId, Commit], doubts: Mapping[TxId, CasckptError]) -> CommitList:
    """Return the list of ``commits`` with the standing of each rewrite."""
    found = dict(doubts)
    for txid, (base, _) in sorted((txid, one.replaces) for txid, one in commits.items() if one.replaces):
        commits[txid], doubt = _judged(commits[txid], commits.get(base))  # which is older, and so was judged before
        if doubt is not None:
            found.setdefault(txid, doubt)
    return CommitList(commits, found)


def _judged(commit: Commit, base: Commit | None) -> tuple[Commit, CasckptError | None]:
    """Return a rewrite with its standing, by what it replaces; and why that is in doubt, None if it is not."""
    standing, doubt = _standing(commit, base)
    return (commit if standing == commit.standing else replace(commit, standing=standing)), doubt


def _standing(commit: Commit, base: Commit | None) -> tuple[str, CasckptError | None]:
    """Return the standing of a rewrite. What is in doubt stands where nothing else of the checkpoint lives."""
    if commit.replaces is None:
        return STANDS, None
    txid, number = commit.replaces
    if base is None:
        key = commit_key(txid)
        return STANDS, Damaged(f"{key}, which {commit.txid} replaces, is missing or cannot be read", key=key)
    if base.standing == VOID or base.replaced == (number, commit.txid):
        return base.standing, None
    if base.number < number:
        return UNSETTLED, None
    unread = next((one for one in base.unread if one >= number), None)
    if unread is None:
        return VOID, None
    key = commit_key(txid, unread)
    why = f"{key}, which may say that {commit.txid} replaces it, is missing or cannot be read"
    return UNSETTLED if base.live else STANDS, Damaged(why, key=key)


def _look_again(repo: Repository, listed: CommitList, logs: Collection[TxId]) -> CommitList:
    """Read the logs of rewritten checkpoints of which the listing shows nothing visible, until nothing is new.

    A listing takes its time: it may show that a rewrite was forgotten, and miss that its base was restored before. Only
    those that ``logs`` are of: the others were looked at before, and have not changed.
    """
    while True:
        now = {commit.txid: _again(repo, commit) for commit in _hidden(listed, logs)}
        changed = {txid: commit for txid, commit in now.items() if commit != listed.commits[txid]}
        if not changed:
            return listed
        for commit in list(changed.values()):
            if commit.replaced is not None and (other := read_log(repo, commit.replaced[1])) is not None:
                changed[other.txid] = other
        listed = _all_judged({**listed.commits, **changed}, listed.damaged)


def _hidden(listed: CommitList, touched: Collection[TxId]) -> list[Commit]:
    """Return live commits of the ids that were rewritten, of which one was touched, and none is visible."""
    live = [commit for commit in listed.commits.values() if commit.live]
    ids = {one.id for one in live if one.txid in touched and (one.replaces or one.replaced)}
    ids -= {one.id for one in live if one.visible} if ids else set()
    return [one for one in live if one.id in ids] if ids else []


def _again(repo: Repository, commit: Commit) -> Commit:
    try:
        return refresh(repo, commit)
    except (Damaged, Refused):
        return commit


def _name(key: str) -> tuple[TxId, int]:
    name = parse_log(key)
    if name is None:
        raise Refused(f"not a key of the store: {key[:200]!r}")
    return name


def _kind(key: str) -> Any:
    return LaterRecord if _name(key)[1] else FirstRecord


def _checked(record: Read, txid: TxId, key: str) -> Read:
    """Return the record, if it belongs under its key."""
    if isinstance(record, CasckptError) or record.txid == txid:
        return record
    return Refused(f"{key} is not usable: it holds a record of transaction {record.txid}", key=key)


def _folded(txid: TxId, log: Mapping[int, Read], before: Commit | None = None) -> Commit | None:
    """Return what the readable records of a log say; None without the first. ``before``: what was known of it."""
    first = log[0]
    if isinstance(first, CasckptError):
        return None
    if isinstance(first, records.RevokedRecord):
        return Commit(txid, first, "revoked", max(log), first.time)
    readable: list[Any] = [log[number] for number in sorted(log) if not isinstance(log[number], CasckptError)]
    telling = [record for record in readable if not isinstance(record, Kept)]
    last = next((record for record in telling if isinstance(record, Purged)), telling[-1])
    before = before or just_committed(first)
    new = {number: log.get(number) for number in range(before.number + 1, max(log) + 1)}
    unread = [number for number, record in new.items() if record is None or isinstance(record, CasckptError)]
    restored = max([before.restored, *unread, *(n for n, record in new.items() if isinstance(record, Restored))])
    links = [(number, record.by) for number, record in new.items() if isinstance(record, Replaced)]
    link = max([*links, *([before.replaced] if before.replaced else [])], default=None)
    return replace(
        before,
        last=_STATES[type(last)],
        number=max(log),
        changed_at=last.time,
        restored=restored,
        replaced=link if link is not None and link[0] > restored else None,
        unread=(*before.unread, *unread),
    )


def _is_whole(log: Mapping[int, Read]) -> bool:
    """Tell whether each record of a log could be read. Where one could not, even of a purged one, it is read again."""
    return not any(isinstance(record, CasckptError) for record in log.values())


def _doubt(log: Mapping[int, Read]) -> CasckptError | None:
    """Return why the state of a transaction is not known for sure; None if it is. What was purged is so for ever.

    A `kept` record says nothing, so it is the one before it that is to be read.
    """
    if any(isinstance(record, Purged) for record in log.values()):
        return None
    first, last = log[0], max(log)
    if isinstance(first, CasckptError):
        return first
    while isinstance(log.get(last), Kept):
        last -= 1
    key = commit_key(first.txid, last)
    found = log.get(last, NotFound(f"{key} is missing, and there are records behind it", key=key))
    return found if isinstance(found, CasckptError) else None


def _holds(commit: Commit, wanted: str) -> bool:
    return commit.last == wanted or (wanted == "restored" and commit.last == "committed")


def _check_standing(commit: Commit, wanted: str) -> None:
    """Of a rewrite that does not stand only a void one may be forgotten, and what was forgotten purged."""
    if commit.standing != STANDS and wanted != "purged" and (commit.standing, wanted) != (VOID, "forgotten"):
        raise Conflict(f"{commit} was not {wanted}: it is a rewrite that does not stand", checkpoints=(commit.id,))


def _check_allowed(commit: Commit, wanted: str) -> None:
    if commit.last in _AFTER[wanted]:
        return
    if commit.last == "purged":
        raise Conflict(f"{commit} was purged: it is gone for good", checkpoints=(commit.id,))
    if commit.last == "revoked":
        raise Conflict(f"transaction {commit.txid} was revoked: there is no checkpoint to change")
    if commit.last == "replaced":
        raise Conflict(f"{commit} has been rewritten, and was not {wanted}; look again", checkpoints=(commit.id,))
    raise Conflict(f"{commit} is {commit.last}, so it cannot be {wanted}; forget it first", checkpoints=(commit.id,))
