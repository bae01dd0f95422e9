"""Folds the log of a transaction into a commit: the state of a checkpoint, and the places where its cells are.

A checkpoint has one log, which holds everything that happens to it. A rewrite stores the same checkpoint elsewhere, or
without some of its tensors. It adds places to the log, and changes nothing else: the id, the order of commits and the
state stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from casckpt.base.groups import grouped
from casckpt.base.lazy import cached_property
from casckpt.errors import CasckptError, NotFound, Revoked
from casckpt.format import records
from casckpt.format.keys import commit_key
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import (
    Back,
    Committed,
    Dropped,
    FirstRecord,
    Forgotten,
    Purged,
    Restored,
    Rewritten,
    TaggedRecord,
    Trimmed,
)
from casckpt.repository.reading import Read

STATES: dict[type, str] = {Forgotten: "forgotten", Restored: "restored", Purged: "purged"}
OF_PLACES = [name for name in Rewritten.__struct_fields__ if name not in {"txid", "time", "who", "by"}]
"""The fields of a commit record that describe its places, and that a rewrite changes."""


class Places(NamedTuple):
    """Where a checkpoint's cells are. ``txid``: the transaction whose folder holds the manifest that says so.

    ``record``: the commit record, with the values that describe these places, such as the head of the manifest.
    """

    txid: TxId
    record: Committed

    def holds(self, other: Places) -> bool:
        """Return whether these places have at least the entries that ``other``, places of the same id, has."""
        mine, theirs = self.record.dropped, other.record.dropped
        return mine is None or mine == theirs or (theirs is not None and mine.patterns <= theirs.patterns)


class Over(NamedTuple):
    """What is known about a log that gc replaces with a line in commits/ended/.

    ``was_whole``: whether it ever had places with every entry of its id. ``places``: the transactions of its other
    places.
    """

    was_whole: bool
    places: Sequence[TxId]


@dataclass(frozen=True)
class Commit:
    """The state of one transaction, from its log in commits/.

    ``last``: "committed", "revoked", "forgotten", "restored" or "purged". ``number``: the highest number in the log.
    ``changed_at``, ``moved_at``: the times at which the state and the current places last changed, in microseconds
    since the epoch. ``changed_by``, ``moved_by``: the numbers of the records that did so. ``who``: who last changed the
    state. ``current``: the current places, or None for a revoked
    transaction. ``existing``: all places that were not ended, in the order of the log. ``ended``: the others.
    ``hidden_by``: for each of these, the numbers of the records that hid and ended them. The former is the one right
    before the latter or, if that one hides nothing, the latter.
    ``tagged``: the (name, generation) of tags that were set. ``restored``: the number of the last `restored` or `back`
    record, or 0.

    ``shown``: the places that this object describes, if they are not the current ones (see `at`).
    """

    txid: TxId
    first: FirstRecord
    last: str
    number: int
    changed_at: int
    who: str = ""
    current: Places | None = None
    existing: tuple[Places, ...] = ()
    ended: tuple[Places, ...] = ()
    moved_at: int = 0
    tagged: tuple[tuple[str, int], ...] = ()
    restored: int = 0
    changed_by: int = 0
    moved_by: int = 0
    hidden_by: tuple[tuple[int, int], ...] = ()
    shown: Places | None = None

    def at(self, places: Places) -> Commit:
        """Return the commit as it was at other places, such as those from before it was thinned."""
        return replace(self, shown=None if places == self.current else places)

    @property
    def live(self) -> bool:
        """Whether the checkpoint is committed and not purged."""
        return self.last not in ("revoked", "purged")

    @property
    def visible(self) -> bool:
        """Whether the checkpoint is live and not forgotten. Old places are never visible."""
        return self.last in ("committed", "restored") and self.shown is None

    @property
    def is_forgotten(self) -> bool:
        """Whether a `forgotten` record hides the checkpoint. Old places are never forgotten on their own."""
        return self.last == "forgotten" and self.shown is None

    @property
    def is_old_places(self) -> bool:
        """Whether this object describes places that are not the current ones."""
        return self.shown is not None

    @property
    def places(self) -> Places:
        """The places that this object describes. Raises `Revoked` if the transaction was revoked."""
        places = self.shown or self.current
        if places is None:
            reason = self.first.reason if isinstance(self.first, records.RevokedRecord) else ""
            raise Revoked(f"transaction {self.txid} was revoked ({reason}), so it has no checkpoint")
        return places

    @property
    def old(self) -> list[Commit]:
        """The commit at each of the existing places that are not the current ones."""
        return [self.at(places) for places in self.existing if places != self.current]

    @property
    def dropped(self) -> Dropped | None:
        """The entries that thinning dropped. None if the checkpoint is whole."""
        return self.committed.dropped if isinstance(self.first, Committed) else None

    @property
    def lacking(self) -> int:
        """How many entries thinning dropped."""
        return 0 if self.dropped is None else self.dropped.entries

    @property
    def bytes_held(self) -> int:
        """The size of the tensors in memory, in bytes, without dropped tensors."""
        return max(0, self.committed.bytes_total - (self.dropped.bytes if self.dropped is not None else 0))

    @property
    def rank(self) -> tuple[bool, int, bool, TxId]:
        """The sort key of commits with the same id: the one to which the id refers comes last.

        This is a visible one, then one with more entries, then one at its current places.
        """
        return self.visible, -self.lacking, self.shown is None, self.txid

    @property
    def committed(self) -> Committed:
        """The commit record, for these places. Raises `Revoked` if the transaction was revoked."""
        return self.places.record

    @property
    def id(self) -> ManifestId:
        """The id of the checkpoint."""
        return self.committed.manifest

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.committed.run

    @property
    def step(self) -> int:
        """The step of the checkpoint in its run."""
        return self.committed.step

    def __str__(self) -> str:
        return f"{self.run}@{self.step} ({self.id[:12]})" if isinstance(self.first, Committed) else self.txid

    def __repr__(self) -> str:
        return f"<Commit {self}, {self.last}>"


def in_order(commits: Iterable[Commit]) -> list[Commit]:
    """Sort live commits: oldest first. If a checkpoint has several, the one with the highest `Commit.rank` comes last.

    Therefore, the last commit of a run or step is the one to which RUN@latest or RUN@STEP refers.
    """
    by_txid = sorted(commits, key=lambda commit: commit.txid)
    twins = grouped(by_txid, lambda commit: (commit.id, commit.run, commit.step))
    if len(twins) == len(by_txid):
        return by_txid
    ranked = {key: iter(sorted(some, key=lambda commit: commit.rank)) for key, some in twins.items()}
    return [next(ranked[commit.id, commit.run, commit.step]) for commit in by_txid]


def kept_with(visible: Sequence[Commit]) -> dict[TxId, TxId]:
    """Return the commits with entries that the commit which answers for their checkpoint lacks, and that commit.

    A rule that keeps the latter keeps both, because these entries may be nowhere else. ``visible``: see `in_order`.
    """
    answers = {(commit.run, commit.step): commit for commit in visible}
    pairs = ((one, answers[one.run, one.step]) for one in visible)
    return {one.txid: other.txid for one, other in pairs if one.id == other.id and not other.places.holds(one.places)}


def just_committed(record: Committed) -> Commit:
    """Return the commit of a log that holds only ``record``."""
    places = Places(record.txid, record)
    return Commit(record.txid, record, "committed", 0, record.time, record.who, places, (places,), moved_at=record.time)


@dataclass(frozen=True)
class CommitList:
    """The listing: a snapshot from one LIST of commits/.

    ``commits``: committed and revoked transactions. ``damaged``: transactions with a record that cannot be read, and
    the error. If the first record can be read, the transaction is also in ``commits``, as its readable records say. gc
    deletes nothing while any transaction is damaged. ``over``: the transactions that commits/ended/ lists. They are not
    in ``commits``, whatever records they still have. ``late``: the names of these records.
    """

    commits: Mapping[TxId, Commit]
    damaged: Mapping[TxId, CasckptError]
    over: Mapping[TxId, Over] = field(default_factory=dict)
    late: frozenset[tuple[TxId, int]] = frozenset()

    def live(self) -> list[Commit]:
        """Return the live commits, oldest first."""
        return list(self._live)

    def placed(self) -> list[Commit]:
        """Return the live commits, oldest first, each one at all of its existing places."""
        return [one for commit in self.live() for one in (*commit.old, commit)]

    def visible(self) -> list[Commit]:
        """Return the visible commits, oldest first."""
        return [commit for commit in self._live if commit.visible]

    def current(self) -> list[Commit]:
        """Return the visible commits, oldest first.

        If several have the same run and step, return only the one that was saved last. If an id has several commits,
        this is the one with the most entries.
        """
        return list(self._current)

    def at(self, run: str, step: int) -> Commit | None:
        """Return the visible commit to which a run and step refer, or None if there is none."""
        return self._answering.get((run, step))

    def superseded(self) -> list[Commit]:
        """Return the visible commits to which their run and step do not refer, oldest first."""
        answers = {commit.txid for commit in self._current}
        return [commit for commit in self.visible() if commit.txid not in answers]

    def runs(self) -> list[str]:
        """Return the sorted names of the runs that have a visible checkpoint."""
        return sorted({commit.run for commit in self._current})

    def of_id(self, id: ManifestId) -> Commit | None:
        """Return the commit to which an id refers: the live commit with the highest `Commit.rank`, or None."""
        return max((commit for commit in self.live() if commit.id == id), key=lambda commit: commit.rank, default=None)

    @cached_property
    def ended(self) -> frozenset[TxId]:
        """The transactions whose manifests and blobs no longer count: revoked ones, and those of ended places."""
        revoked = (txid for txid, commit in self.commits.items() if commit.last == "revoked")
        ended = (places.txid for one in self.commits.values() for places in one.ended)
        return frozenset([*revoked, *ended, *self._over])

    @cached_property
    def names(self) -> frozenset[tuple[TxId, int]]:
        """The names (txid, number) of all records of these logs."""
        every = ((txid, number) for txid, one in self.commits.items() for number in range(one.number + 1))
        return frozenset([*every, *((txid, 0) for txid in (*self.damaged, *self.over))])

    @cached_property
    def recorded(self) -> frozenset[TxId]:
        """The transactions that have a record here: each log's own, and those of all its places."""
        every = (places.txid for one in self.commits.values() for places in (*one.existing, *one.ended))
        return frozenset([*self.commits, *self.damaged, *every, *self._over])

    @cached_property
    def _over(self) -> list[TxId]:
        return [txid for first, over in self.over.items() for txid in (first, *over.places)]

    @cached_property
    def recorded_tags(self) -> Mapping[str, int]:
        """The highest generation of each tag that commits/ records, by name. tags/ has it, or a later one."""
        return dict(sorted(tag for commit in self.commits.values() for tag in commit.tagged))

    @cached_property
    def _live(self) -> list[Commit]:
        return in_order(commit for commit in self.commits.values() if commit.live)

    @cached_property
    def _current(self) -> list[Commit]:
        return [commit for commit in self.visible() if self._answering[commit.run, commit.step] is commit]

    @cached_property
    def _answering(self) -> dict[tuple[str, int], Commit]:
        return {(commit.run, commit.step): commit for commit in self.visible()}


def with_logs(listed: CommitList, logs: Mapping[TxId, Mapping[int, Read]]) -> CommitList:
    """Return the listing, with the transactions in ``logs`` updated from these logs, and without those in ``over``."""
    kept = listed.commits.items()
    commits = {txid: commit for txid, commit in kept if txid not in logs and txid not in listed.over}
    commits |= {txid: commit for txid, log in logs.items() if (commit := fold(log))}
    damaged = {txid: error for txid, log in logs.items() if (error := doubt_of(log))}
    return replace(listed, commits=commits, damaged={**listed.damaged, **damaged})


def fold(log: Mapping[int, Read], before: Commit | None = None) -> Commit | None:
    """Return the commit that the readable records of a log produce. ``before``: the state up to a number of the log.

    Return None if the first record cannot be read.
    """
    if before is None:
        first = log[0]
        if isinstance(first, CasckptError):
            return None
        if isinstance(first, records.RevokedRecord):
            return Commit(first.txid, first, "revoked", max(log), first.time)
        before = just_committed(first)
    commit = before
    for number in sorted(number for number in log if number > before.number):
        changes = {} if commit.last == "purged" else _changes(commit, log[number], number)
        commit = replace(commit, number=number, **changes)
    return commit


def _changes(commit: Commit, record: Read, number: int) -> dict[str, Any]:
    """Return the fields of ``commit`` that the next record of its log changes. An unreadable record changes none."""
    match record:
        case Forgotten() | Purged() | Restored():
            hid = commit.changed_by if commit.last == "forgotten" else number
            ends = _ends(commit, (), number, hid) if isinstance(record, Purged) else {}
            restored = number if isinstance(record, Restored) else commit.restored
            state = {"last": STATES[type(record)], "changed_at": record.time, "changed_by": number, "who": record.who}
            return {**state, "restored": restored, **ends}
        case Rewritten():
            values = {name: getattr(record, name) for name in OF_PLACES}
            places = Places(record.by, records.changed(commit.committed, **values))
            every = (*commit.existing, places)
            return {"current": places, "existing": every, "moved_at": record.time, "moved_by": number}
        case Back():
            to = next((places for places in commit.existing if places.txid == record.to), commit.current)
            return {"current": to, "moved_at": record.time, "moved_by": number, "restored": number}
        case Trimmed():
            return _ends(commit, (commit.places,), number, commit.moved_by)
        case TaggedRecord():
            return {"tagged": (*commit.tagged, (record.name, record.generation))}
    return {}


def _ends(commit: Commit, left: tuple[Places, ...], number: int, hid: int) -> dict[str, Any]:
    """Return the fields after record ``number`` has ended all places but ``left``. ``hid``: what hid them before."""
    gone = [places for places in commit.existing if places not in left]
    by = (hid if hid == number - 1 else number), number
    return {"existing": left, "ended": (*commit.ended, *gone), "hidden_by": (*commit.hidden_by, *(by for _ in gone))}


def doubt_of(log: Mapping[int, Read], after: int = 0) -> CasckptError | None:
    """Return the error of the first record that cannot be read, or that is missing. A purge leaves no doubt.

    ``after``: the number of the last record that was read before.
    """
    if any(isinstance(record, Purged) for record in log.values()):
        return None
    first = log[0]
    if isinstance(first, CasckptError):
        return first
    for number in range(after + 1, max(log) + 1):
        key = commit_key(first.txid, number)
        record = log.get(number, NotFound(f"{key} is missing, but later records exist", key=key))
        if isinstance(record, CasckptError):
            return record
    return None
