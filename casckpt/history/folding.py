"""What the logs of commits/ say, folded: one by one, and of rewrites together with those of their bases.

A rewrite is a commit that holds the checkpoint of another one, its base, at other places. It stands from the instant in
which the record of the base that it has chosen says `replaced` by it, until a `restored` behind that takes it back;
for ever, if the base is purged. Once that record holds something else, or was taken back, or the base is void, it is
void for ever. So what a rewrite is stands in the log of its base, and in that of the base of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from casckpt.base.lazy import cached_property
from casckpt.errors import CasckptError, Damaged, NotFound, Revoked
from casckpt.format import records
from casckpt.format.keys import commit_key
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import Committed, Dropped, FirstRecord, Forgotten, Kept, Purged, Replaced, Restored
from casckpt.repository.reading import Read

STATES: dict[type, str] = {
    Committed: "committed",
    records.RevokedRecord: "revoked",
    Forgotten: "forgotten",
    Restored: "restored",
    Purged: "purged",
    Replaced: "replaced",
}
STANDS, UNSETTLED, VOID = "stands", "unsettled", "void"
"""Of a commit that is no rewrite, the first. A rewrite is unsettled until anything holds the record that it chose."""


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
    def is_old_places(self) -> bool:
        """It is what a rewrite replaced, or a rewrite that does not stand: not what its id means."""
        return self.replaced is not None or self.standing != STANDS

    @property
    def dropped(self) -> Dropped | None:
        """What it lacks of the first save; None for nothing."""
        return self.first.dropped if isinstance(self.first, Committed) else None

    @property
    def bytes_held(self) -> int:
        """Bytes of its tensors, in memory, without what was left out."""
        return max(0, self.committed.bytes_total - (self.dropped.bytes if self.dropped is not None else 0))

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

    def at(self, run: str, step: int) -> Commit | None:
        """Return the visible one that answers to a run and step; None for none."""
        return self._answering.get((run, step))

    def superseded(self) -> list[Commit]:
        """Return visible ones of which a later twin (same run and step) is visible, oldest first."""
        answers = {commit.txid for commit in self._current}
        return [commit for commit in self.visible() if commit.txid not in answers]

    def runs(self) -> list[str]:
        """Return the names of the runs that have a visible checkpoint, sorted."""
        return sorted({commit.run for commit in self._current})

    def of_id(self, id: ManifestId) -> Commit | None:
        """Return what an id means: of its live commits the visible one, else the one that answers; None without any."""
        return max((one for one in self.live() if one.id == id), key=lambda one: one.rank, default=None)

    def standin(self, commit: Commit, *, loses: bool = False) -> Commit:
        """Return what has replaced ``commit`` in the end, and has all that it has; itself where nothing has.

        ``loses``: it need not have all.
        """
        while commit.replaced is not None:
            other = self.commits.get(commit.replaced[1])
            if other is None or not (loses or commit in Holdings([other])):
                break
            commit = other
        return commit

    def needed(self, *, loses: bool = False) -> list[Commit]:
        """Return live ones that nothing stands in for, oldest first: whose loss would be one.

        ``loses``: what was thinned stands in for what was whole.
        """
        return [commit for commit in self.standing() if self.standin(commit, loses=loses) is commit]

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
        return [commit for commit in self.visible() if self._answering[commit.run, commit.step] is commit]

    @cached_property
    def _answering(self) -> dict[tuple[str, int], Commit]:
        return {(commit.run, commit.step): commit for commit in self.visible()}


class Holdings:
    """What some commits hold: a commit is in it if one of them has the same id, and lacks nothing that it has."""

    def __init__(self, commits: Iterable[Commit]) -> None:
        self._held = {(commit.id, commit.dropped) for commit in commits}

    def __contains__(self, commit: Commit) -> bool:
        return not self._held.isdisjoint({(commit.id, None), (commit.id, commit.dropped)})


def with_logs(listed: CommitList, logs: Mapping[TxId, Mapping[int, Read]]) -> CommitList:
    """Return the list, with what ``logs`` say of their transactions."""
    commits = {txid: commit for txid, commit in listed.commits.items() if txid not in logs}
    commits |= {txid: commit for txid, log in logs.items() if (commit := fold(txid, log))}
    doubts = {txid: error for txid, log in logs.items() if (error := doubt_of(log))}
    return all_judged(commits, doubts)


def all_judged(commits: dict[TxId, Commit], doubts: Mapping[TxId, CasckptError]) -> CommitList:
    """Return the list of ``commits`` with the standing of each rewrite."""
    found = dict(doubts)
    for txid, (base, _) in sorted((txid, one.replaces) for txid, one in commits.items() if one.replaces):
        commits[txid], doubt = judged(commits[txid], commits.get(base))  # which is older, and so was judged before
        if doubt is not None:
            found.setdefault(txid, doubt)
    return CommitList(commits, found)


def judged(commit: Commit, base: Commit | None) -> tuple[Commit, CasckptError | None]:
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


def fold(txid: TxId, log: Mapping[int, Read], before: Commit | None = None) -> Commit | None:
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
        last=STATES[type(last)],
        number=max(log),
        changed_at=last.time,
        restored=restored,
        replaced=link if link is not None and link[0] > restored else None,
        unread=(*before.unread, *unread),
    )


def is_whole(log: Mapping[int, Read]) -> bool:
    """Tell whether each record of a log could be read. Where one could not, even of a purged one, it is read again."""
    return not any(isinstance(record, CasckptError) for record in log.values())


def doubt_of(log: Mapping[int, Read]) -> CasckptError | None:
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
