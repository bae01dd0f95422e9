"""Writers, gcs and a user share a store, with their calls in any order: live data is never lost.

The code is the real code; only the order of the storage calls is random. The invariants are checked after every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from casckpt.base.groups import grouped
from casckpt.errors import Revoked
from casckpt.format.keys import parse_object
from casckpt.format.sections.blobs import BlobRef
from casckpt.history import announcements, ended, leases, tags, transactions
from casckpt.history.commits import CommitList, list_commits, list_names, read_log
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc import gc, recovery
from casckpt.upkeep.gc import purge as retiring
from tests.support.announced import untold
from tests.support.repositories import put_blob, save
from tests.upkeep.gc.play import HOUR, ROUNDS, Lost, Play, copy_again, draw_from_log, draw_known, finish

pytestmark = pytest.mark.sweep
AGES = (
    (recovery, "MIN_AGE"), (recovery, "FEWEST"), (ended, "TRUSTED"),
    (announcements, "MIN_AGE"), (announcements, "TRUSTED"),
)  # fmt: skip
HELD_UP = (0.05, 0.2)  # few switches, but a fifth of all changes are late: a bug shows up in about a tenth of the plays


@pytest.fixture(autouse=True)
def in_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor runs what others run in a thread beside it."""
    monkeypatch.setattr(transactions, "run_beside", lambda act: act())


# plays


def two_writers_and_a_gc(play: Play) -> None:
    play.writer("w0")
    play.writer("w1")
    play.gc("g0")
    play.user("user")


def two_gcs(play: Play) -> None:
    play.writer("w0")
    play.gc("g0")
    play.gc("g1")
    play.user("user")


def patient_gcs(play: Play) -> None:
    """The gcs time out, and continue from their own or each other's state."""
    play.writer("w0")
    play.writer("w1")
    play.gc("g0", revoke_after=1e9, runs=3)
    play.gc("g1", revoke_after=1e9, runs=2)


def holders(play: Play) -> None:
    """A granted lease is in force until it ends, whatever a user forgets and restores."""
    save(play.watcher, step=2, texts=["base 2"])  # so that a rule forgets the previous checkpoint
    play.holder("h0")
    play.holder("h1")
    play.gc("g0", runs=3)
    play.user("user")


def twins(play: Play) -> None:
    """Commits of a leased checkpoint may be purged as long as one remains."""
    copy_again(play.watcher)
    _, commit = leases.take(play.watcher, list_commits(play.watcher).visible()[0], 9 * HOUR)
    play.held["watcher"] = commit.id
    play.repairer("r0")
    play.gc("g0")
    play.gc("g1")
    play.user("user")


def two_rewriters(play: Play) -> None:
    """A checkpoint that is never forgotten is always visible."""
    play.never_gone = {one.id for one in list_commits(play.watcher).visible()}
    play.repairer("r0")
    play.repairer("r1")
    play.undoer("u0")
    play.writer("w0")
    play.gc("g0", keeps_all=True)


def failing_saves(play: Play) -> None:
    """Saves that fail remove what they uploaded, if need be before they are revoked."""
    play.failing("f0")
    play.writer("w0")
    play.gc("g0")
    play.gc("g1", runs=3)
    play.user("user")


STYLES = [(0.2, 0.0), HELD_UP]
PLAYS = [two_writers_and_a_gc, two_gcs, patient_gcs, holders, twins, two_rewriters, failing_saves]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cast", PLAYS)
def test_live_blobs_are_never_lost_and_all_others_are_deleted(
    tmp_path: Path, seed: int, full: bool, cast: Callable[[Play], None]
) -> None:
    deleted = 0
    for round_ in range(ROUNDS * (46 if full else 1)):
        play = Play(tmp_path / str(round_), seed + round_)
        cast(play)
        play.run(*STYLES[round_ % 2])
        tags_left = tags.tags(play.watcher)
        for name in tags_left:
            tags.delete_tag(play.watcher, name)
        play.clean_up()
        deleted += play.deleted
    assert deleted, "no gc that ran beside others ever deleted anything"


def deleters_of_logs(play: Play) -> None:
    """Two gcs delete the logs of transactions as soon as they are over."""
    play.writer("w0")
    play.writer("w1")
    play.repairer("r0")
    play.user("user")
    play.gc("g0", runs=3)
    play.gc("g1", runs=3)


@pytest.mark.timeout(1800)
def test_logs_are_deleted_while_others_write(
    tmp_path: Path, seed: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a minimum age, each process looks for the lines of each transaction. A late record never counts."""
    for place, name in AGES:
        monkeypatch.setattr(place, name, 0)
    late = deleted = 0
    for round_ in range(ROUNDS * (46 if full else 1)):
        play = Play(tmp_path / str(round_), seed + round_)
        deleters_of_logs(play)

        def look(play: Play = play) -> None:
            nonlocal late
            play.look()
            if not play.has_changed():
                return
            listed = list_commits(play.watcher)
            late += bool(listed.late)
            for txid in listed.over:
                found = read_log(play.watcher, txid)
                assert found is not None
                assert not found.live

        play.stage.run(play.choices(*STYLES[round_ % 2]), look)
        play.clean_up()
        listed = list_commits(play.watcher)
        assert not listed.damaged
        assert not untold(play.watcher)
        assert not listed.over.keys() & {txid for txid, _ in list_names(play.watcher)}
        deleted += len(listed.over)
    assert deleted
    assert late, "nobody ever looked while logs were deleted"


@pytest.mark.parametrize("who", ["writer", "repairer"])
def test_writers_that_are_killed_leave_nothing_behind(tmp_path: Path, seed: int, who: str) -> None:
    for round_ in range(ROUNDS // 2):
        play = Play(tmp_path / str(round_), seed + round_)
        play.writer("w0") if who == "writer" else play.repairer("w0")
        play.gc("g0")
        calls = play.draw.randrange(1, 12)
        choose = play.choices()

        def choose_until_killed(
            waiting: list[str], play: Play = play, calls: int = calls, choose: Callable[[list[str]], str] = choose
        ) -> str:
            dead = sum(name == "w0" for name, _ in play.stage.log) >= calls
            return choose([name for name in waiting if name != "w0" or not dead] or waiting)

        play.stage.run(choose_until_killed, play.look, killed=frozenset({"w0"}))
        play.clean_up()
        play.clean_up()  # purges the rest, because the rewriter is dead
        listed = list_commits(play.watcher)
        assert listed.live() == listed.visible()


# protocol errors that the plays detect


def lists_first(play: Play, repo: Repository, name: str) -> None:
    known = draw_known(play, repo)
    transaction = transactions.begin(repo, "run", 9)
    try:
        finish(repo, transaction, [name], known)
    except Revoked:
        transaction.close()


def reads_logs_first(play: Play, repo: Repository, name: str) -> None:
    known = draw_from_log(play, repo)
    transaction = transactions.begin(repo, "run", 9)
    try:
        finish(repo, transaction, [name], known)
    except Revoked:
        transaction.close()


def uploads_first(play: Play, repo: Repository, name: str) -> None:
    early = put_blob(repo, repo.new_txid("run", 9), name)
    transaction = transactions.begin(repo, "run", 9)
    try:
        finish(repo, transaction, [], [early])
    except Revoked:
        transaction.close()


def reuses_orphans(play: Play, repo: Repository, name: str) -> None:
    transaction = transactions.begin(repo, "run", 9)
    entries = [(entry, parse_object(entry.key)) for entry in repo.storage.list("objects/")]
    found = [BlobRef(n.hash, e.size, n.uploader) for e, n in entries if n and n.kind == "safetensors"]  # type: ignore[arg-type]  # blobs have one
    try:
        finish(repo, transaction, [], found)
    except Revoked:
        transaction.close()


def is_lost(tmp_path: Path, seed: int, cast: Callable[[Play], None], quiet: int = 0) -> bool:
    """Run plays until data is lost. ``quiet``: the number of plays to skip, which lose nothing with the fixed
    seeds."""
    for round_ in range(quiet, quiet + 1000):
        play = Play(tmp_path / str(round_), seed + round_)
        cast(play)
        try:
            play.run(*HELD_UP)
        except Lost:
            return True
    return False


QUIET: dict[Callable[[Play, Repository, str], None], int] = {
    lists_first: 36,
    reads_logs_first: 62,
    uploads_first: 3,
    reuses_orphans: 31,
}


@pytest.mark.parametrize("program", QUIET)
def test_a_writer_that_breaks_the_protocol_loses_data(
    tmp_path: Path, seed: int, program: Callable[[Play, Repository, str], None]
) -> None:
    def cast(play: Play) -> None:
        play.writer("w0", program)
        play.writer("w1", program)
        play.gc("g0")
        play.user("user")

    assert is_lost(tmp_path, seed, cast, QUIET[program])


def no_waiting(repo: object, waits: object, patience: object, tell: object) -> list[object]:
    return []


def no_roots(repo: object, found: object, min_age: object) -> None:
    """Do not treat commits made since the candidates were listed as roots."""


@pytest.mark.parametrize(("name", "broken"), [("wait_until_closed", no_waiting), ("spare_roots", no_roots)])
def test_a_gc_that_breaks_the_protocol_loses_data(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(gc, name, broken)
    assert is_lost(tmp_path, seed, two_writers_and_a_gc, quiet=37 if broken is no_roots else 0)


def test_granting_a_lease_without_reading_the_log_loses_its_checkpoint(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_granted", lambda repo, tag, commit, before: commit)
    assert is_lost(tmp_path, seed, holders, quiet=6)


def test_a_gc_without_a_second_listing_of_tags_loses_leased_checkpoints(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "_tags_now", lambda repo: {})
    assert is_lost(tmp_path, seed, holders, quiet=43)


def test_a_gc_that_counts_forgotten_twins_loses_leased_checkpoints(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AnyTwin(retiring._Claims):
        def __init__(self, named: Mapping[str, tags.Tag], listed: CommitList) -> None:
            super().__init__(named, listed)
            count = Counter(commit.id for commit in listed.live())
            twins = (commit for commit in listed.live() if count[commit.id] > 1)
            self._seen = grouped(twins, lambda commit: commit.id)

    monkeypatch.setattr(retiring, "_Claims", AnyTwin)
    assert is_lost(tmp_path, seed, twins, quiet=23)


def test_a_save_that_deletes_first_though_it_tried_to_commit_loses_data(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = property(lambda transaction: False, lambda transaction, has_tried: None)
    monkeypatch.setattr(transactions.Transaction, "_has_tried", never, raising=False)
    assert is_lost(tmp_path, seed, failing_saves, quiet=83)
