"""Folds logs into commits. Each log is folded separately. The result for a rewrite also depends on its base's log.

A rewrite is a commit that holds the checkpoint of a different commit, its base, in different blobs. It names a number
in its base's log. It stands from the moment at which the record with this number says that the rewrite replaces the
base. It stands until a later `restored` record undoes this, or permanently if the base is purged. If the record says
something else, or was undone, or the base is void, the rewrite is permanently void. Therefore, the state of a rewrite
depends on the log of its base, and on the log of that base's own base.
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
"""The standing of a commit. A commit that is not a rewrite stands. A rewrite is unsettled until its number is used."""


@dataclass(frozen=True)
class Commit:
    """The state of one transaction, from its log in commits/.

    ``last``: "committed", "revoked", "forgotten", "restored", "replaced" or "purged". ``number``: the highest number
    in the log. A `kept` record only uses up a number. ``changed_at``: the time of the last record, in microseconds
    since the epoch. ``who``: who created that record. ``restored``: the number of the last `restored` record, or 0 if
    there is none. An unlisted or unreadable record counts as `restored`. ``replaced``: the number of a `replaced`
    record that no `restored` record has undone, and the transaction of the rewrite. ``unread``: the numbers of unlisted
    and unreadable records. ``standing``: `STANDS`, `UNSETTLED` or `VOID`, from the base's log.
    """

    txid: TxId
    first: FirstRecord
    last: str
    number: int
    changed_at: int
    who: str = ""
    restored: int = 0
    replaced: tuple[int, TxId] | None = None
    unread: tuple[int, ...] = ()
    standing: str = STANDS

    @property
    def live(self) -> bool:
        """Whether the checkpoint is committed and not purged."""
        return self.last not in ("revoked", "purged")

    @property
    def answers(self) -> bool:
        """Whether the id refers to this commit: the commit is valid, and was not replaced."""
        return self.standing == STANDS and self.last != "replaced"

    @property
    def visible(self) -> bool:
        """Whether the commit is live, not forgotten, and the one to which its id refers."""
        return self.last in ("committed", "restored") and self.standing == STANDS

    @property
    def is_forgotten(self) -> bool:
        """Whether a `forgotten` record hides the commit."""
        return self.last == "forgotten" and self.standing == STANDS

    @property
    def replaces(self) -> tuple[TxId, int] | None:
        """The transaction of its base, and the number that it needs in the base's log. None if it is not a rewrite."""
        return self.first.replaces if isinstance(self.first, Committed) else None

    @property
    def is_old_places(self) -> bool:
        """Whether this is a replaced commit, or a rewrite that does not stand.

        The id then refers to a different commit.
        """
        return self.replaced is not None or self.standing != STANDS

    @property
    def dropped(self) -> Dropped | None:
        """The entries that thinning dropped. None if the checkpoint is whole."""
        return self.first.dropped if isinstance(self.first, Committed) else None

    @property
    def bytes_held(self) -> int:
        """The size of the tensors in memory, in bytes, without dropped tensors."""
        return max(0, self.committed.bytes_total - (self.dropped.bytes if self.dropped is not None else 0))

    @property
    def origin(self) -> TxId:
        """The transaction of the first save. It determines which of two checkpoints is newer."""
        return (self.first.origin if isinstance(self.first, Committed) else None) or self.txid

    @property
    def order(self) -> tuple[TxId, bool, bool, bool, TxId]:
        """The sort key of commits, oldest first.

        If a save has several commits, the one to which its id refers comes last.
        """
        return self.origin, *self.rank

    @property
    def rank(self) -> tuple[bool, bool, bool, TxId]:
        """The sort key of commits with the same id. The commit to which the id refers comes last."""
        return self.visible, self.answers, self.dropped is None, self.txid

    @property
    def committed(self) -> Committed:
        """The first record. Raises `Revoked` if the transaction was revoked."""
        if isinstance(self.first, Committed):
            return self.first
        raise Revoked(f"transaction {self.txid} was revoked ({self.first.reason}), so it has no checkpoint")

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


def just_committed(record: Committed) -> Commit:
    """Return the commit of a log that holds only ``record``."""
    standing = STANDS if record.replaces is None else UNSETTLED
    return Commit(record.txid, record, "committed", 0, record.time, record.who, standing=standing)


@dataclass(frozen=True)
class CommitList:
    """The listing: a snapshot from one LIST of commits/.

    ``commits``: committed and revoked transactions. ``damaged``: transactions whose first or last record cannot be
    read, with the error. If the first record can be read, the transaction is also in ``commits``, in its last readable
    state. gc deletes nothing while any transaction is damaged.
    """

    commits: Mapping[TxId, Commit]
    damaged: Mapping[TxId, CasckptError]

    def live(self) -> list[Commit]:
        """Return the live commits, oldest first."""
        return [commit for commit in self._sorted if commit.live]

    def standing(self) -> list[Commit]:
        """Return the live commits, oldest first. Omit rewrites that do not stand."""
        return [commit for commit in self._sorted if commit.live and commit.standing == STANDS]

    def visible(self) -> list[Commit]:
        """Return the visible commits, oldest first."""
        return [commit for commit in self._sorted if commit.visible]

    def current(self) -> list[Commit]:
        """Return the visible commits, oldest first.

        If several have the same run and step, return only the one that was saved last.
        """
        return list(self._current)

    def at(self, run: str, step: int) -> Commit | None:
        """Return the visible commit to which a run and step refer, or None if there is none."""
        return self._answering.get((run, step))

    def superseded(self) -> list[Commit]:
        """Return the visible commits that a later commit of the same run and step supersedes, oldest first."""
        answers = {commit.txid for commit in self._current}
        return [commit for commit in self.visible() if commit.txid not in answers]

    def runs(self) -> list[str]:
        """Return the sorted names of the runs that have a visible checkpoint."""
        return sorted({commit.run for commit in self._current})

    def of_id(self, id: ManifestId) -> Commit | None:
        """Return the commit to which an id refers: the live commit with the highest `Commit.rank`, or None."""
        return max((commit for commit in self.live() if commit.id == id), key=lambda commit: commit.rank, default=None)

    def standin(self, commit: Commit, *, loses: bool = False) -> Commit:
        """Follow the commits that have replaced ``commit`` without a loss.

        Return the last one, or ``commit`` if there is none.

        ``loses``: also accept a thinned commit.
        """
        while commit.replaced is not None:
            other = self.commits.get(commit.replaced[1])
            if other is None or not (loses or commit in Holdings([other])):
                break
            commit = other
        return commit

    def needed(self, *, loses: bool = False) -> list[Commit]:
        """Return the live commits that no other commit has replaced without a loss, oldest first.

        ``loses``: accept a thinned commit as the replacement of a whole one.
        """
        return [commit for commit in self.standing() if self.standin(commit, loses=loses) is commit]

    def is_rewrite_of(self, commit: Commit | None, txid: TxId) -> bool:
        """Return whether ``commit`` is a rewrite of the transaction ``txid``, or of one of its rewrites."""
        while commit is not None and commit.replaces is not None:
            if commit.replaces[0] == txid:
                return True
            commit = self.commits.get(commit.replaces[0])
        return False

    @cached_property
    def recorded_tags(self) -> Mapping[str, int]:
        """The highest generation of each tag that commits/ records, by name. tags/ has it, or a later one."""
        firsts = (commit.first for commit in self.commits.values())
        return dict(sorted(one.tagged for one in firsts if isinstance(one, records.RevokedRecord) and one.tagged))

    @cached_property
    def _sorted(self) -> list[Commit]:
        found = [self.commits[txid] for txid in sorted(self.commits)]
        # the usual case, which does not need the slow sort
        is_plain = all(commit.origin == commit.txid for commit in found)
        return found if is_plain else sorted(found, key=lambda commit: commit.order)

    @cached_property
    def _current(self) -> list[Commit]:
        return [commit for commit in self.visible() if self._answering[commit.run, commit.step] is commit]

    @cached_property
    def _answering(self) -> dict[tuple[str, int], Commit]:
        return {(commit.run, commit.step): commit for commit in self.visible()}


class Holdings:
    """A container of commits.

    It contains a commit if one of its own commits has the same id, and at least the same entries.
    """

    def __init__(self, commits: Iterable[Commit]) -> None:
        self._held = {(commit.id, commit.dropped): commit for commit in commits}

    def __contains__(self, commit: Commit) -> bool:
        return self.get(commit) is not None

    def get(self, commit: Commit) -> Commit | None:
        """Return the commit that makes this container contain ``commit``, or None."""
        return self._held.get((commit.id, None)) or self._held.get((commit.id, commit.dropped))


def with_logs(listed: CommitList, logs: Mapping[TxId, Mapping[int, Read]]) -> CommitList:
    """Return the listing, with the transactions in ``logs`` updated from these logs."""
    commits = {txid: commit for txid, commit in listed.commits.items() if txid not in logs}
    commits |= {txid: commit for txid, log in logs.items() if (commit := fold(txid, log))}
    doubts = {txid: error for txid, log in logs.items() if (error := doubt_of(log))}
    return all_judged(commits, doubts)


def all_judged(commits: dict[TxId, Commit], doubts: Mapping[TxId, CasckptError]) -> CommitList:
    """Return a listing of ``commits``. Set the standing of each rewrite."""
    damaged = dict(doubts)
    for txid, (base, _) in sorted((txid, commit.replaces) for txid, commit in commits.items() if commit.replaces):
        # the base is older, so it has already been judged
        commits[txid], doubt = judged(commits[txid], commits.get(base))
        if doubt is not None:
            damaged.setdefault(txid, doubt)
    return CommitList(commits, damaged)


def judged(commit: Commit, base: Commit | None) -> tuple[Commit, CasckptError | None]:
    """Return a rewrite with the standing that follows from its base, and an error if the standing is in doubt."""
    standing, doubt = _standing(commit, base)
    return (commit if standing == commit.standing else replace(commit, standing=standing)), doubt


def _standing(commit: Commit, base: Commit | None) -> tuple[str, CasckptError | None]:
    """Return the standing of a rewrite. In case of doubt, it stands if no other commit of the checkpoint is live."""
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
    unread = next((other for other in base.unread if other >= number), None)
    if unread is None:
        return VOID, None
    key = commit_key(txid, unread)
    why = f"{key}, which may say that {commit.txid} replaces it, is missing or cannot be read"
    return UNSETTLED if base.live else STANDS, Damaged(why, key=key)


def fold(txid: TxId, log: Mapping[int, Read], before: Commit | None = None) -> Commit | None:
    """Return the commit that the readable records of a log produce. ``before``: the previous state."""
    first = log[0]
    if isinstance(first, CasckptError):
        return None
    if isinstance(first, records.RevokedRecord):
        return Commit(txid, first, "revoked", max(log), first.time)
    readable: list[Any] = [log[number] for number in sorted(log) if not isinstance(log[number], CasckptError)]
    changes = [record for record in readable if not isinstance(record, Kept)]
    last = next((record for record in changes if isinstance(record, Purged)), changes[-1])
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
        who=getattr(last, "who", ""),
        restored=restored,
        replaced=link if link is not None and link[0] > restored else None,
        unread=(*before.unread, *unread),
    )


def is_whole(log: Mapping[int, Read]) -> bool:
    """Return whether all records of a log could be read. If not, the next listing rereads the log."""
    return not any(isinstance(record, CasckptError) for record in log.values())


def doubt_of(log: Mapping[int, Read]) -> CasckptError | None:
    """Return the error that makes a transaction's state uncertain, or None if it is certain. A purge is final.

    A `kept` record does not change the state, so the record before it must be readable.
    """
    if any(isinstance(record, Purged) for record in log.values()):
        return None
    first, last = log[0], max(log)
    if isinstance(first, CasckptError):
        return first
    while isinstance(log.get(last), Kept):
        last -= 1
    key = commit_key(first.txid, last)
    record = log.get(last, NotFound(f"{key} is missing, but later records exist", key=key))
    return record if isinstance(record, CasckptError) else None
