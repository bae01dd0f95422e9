"""gc helps processes that follow runs: it completes the announcements of dead processes, and announces all records."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.base.names import run_hash
from casckpt.contents import blobs, manifests
from casckpt.errors import StorageError
from casckpt.format.keys import announcement_key, commit_key
from casckpt.history import commits
from casckpt.history.announcements import announce, look, read_back
from casckpt.history.commits import list_commits
from casckpt.history.following import is_visible, newest
from casckpt.history.transactions import begin
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.recovery import faults, settle
from casckpt.upkeep.repair.verify import verify
from tests.support.announced import announcements, undecided, untold
from tests.support.dying import Deadly, Killed
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.gcs import collect
from tests.support.repositories import START, Ticks, commit_bare, committed, meanwhile, memory, repository, save
from tests.upkeep.gc.play import finish

RUN, HOUR = run_hash("run"), 3600.0


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return repository(tmp_path, FaultyStore(memory()))


def clock(repo: Repository) -> Ticks:
    found = repo.clock
    assert isinstance(found, Ticks)
    return found


def known(repo: Repository, tmp_path: Path) -> RunCache:
    host = repository(tmp_path / "new", repo.storage, seed=9)
    look(host, RUN)
    return read_back(host, RUN)


def die_before_the_record(repo: Repository) -> commits.Commit:
    one = commits.forget(repo, commit_bare(repo))
    repo.storage.inject(fail_before("put", key=f"{commit_key(one.txid)}.2"))  # type: ignore[attr-defined]  # a FaultyStore
    with pytest.raises(StorageError):
        commits.restore(repo, one)
    return one


def test_gc_fills_log_numbers_that_were_announced_long_ago(repo: Repository) -> None:
    one = die_before_the_record(repo)
    settle(repo, HOUR, [])
    assert list_commits(repo).commits[one.txid].number == 1  # the process that announced it may just be slow
    clock(repo).advance(HOUR)
    settle(repo, HOUR, [])
    now = list_commits(repo).commits[one.txid]
    assert (now.last, now.number) == ("forgotten", 2)
    before = {entry.key for entry in repo.storage.list("")}
    settle(repo, 0, [])
    assert {entry.key for entry in repo.storage.list("")} == before


def test_an_announced_save_whose_process_died_is_revoked(repo: Repository) -> None:
    record = committed(repo)
    announce(repo, [(record.txid, 0)])
    settle(repo, 0, [])
    assert list_commits(repo).commits[record.txid].last == "revoked"


def test_recovery_does_not_revoke_an_open_save(repo: Repository) -> None:
    transaction = begin(repo, "run", 0)
    announce(repo, [(transaction.txid, 0)])
    settle(repo, 0, [])
    assert list_commits(repo).commits == {}
    transaction.commit(committed(repo, txid=transaction.txid))


def test_a_slow_process_announces_the_next_log_number(repo: Repository) -> None:
    one = die_before_the_record(repo)
    settle(repo, 0, [])
    assert commits.restore(repo, one).number == 3


def test_other_processes_can_announce_during_recovery(repo: Repository) -> None:
    """The threads of a process share what it remembers about a run."""
    dead = [die_before_the_record(repo) for _ in range(2)]
    clock(repo).advance(HOUR)
    repo.storage.inject(call_first("put", meanwhile(lambda: commit_bare(repo, step=7)), key="commits/*.2"))  # type: ignore[attr-defined]  # a FaultyStore
    settle(repo, HOUR, [])
    assert [list_commits(repo).commits[one.txid].number for one in dead] == [2, 2]


def test_gc_announces_commits_that_were_not_announced(repo: Repository, tmp_path: Path) -> None:
    made = [commit_bare(repo, step=step) for step in range(3)]
    commits.forget(repo, made[2])
    for entry in list(repo.storage.list("runs/")):
        repo.storage.delete(entry.key)
    host = repository(tmp_path / "host", repo.storage, seed=3)
    assert newest(host, "run", is_visible) is None
    assert {key for key, _ in faults(host, list_commits(host), anew=True)} == {
        commit_key(made[0].txid),
        commit_key(made[1].txid),
        commit_key(made[2].txid),
    }
    settle(host, HOUR, [])
    assert newest(host, "run", is_visible) == made[1]
    assert known(repo, tmp_path).announced == {one.txid: 0 for one in made}
    assert faults(host, list_commits(host), anew=True) == []


def test_gc_fills_a_gap_in_the_announcements(repo: Repository, tmp_path: Path) -> None:
    """A reader that has read up to the gap continues after it.

    The records of the number that was filled are reannounced.
    """
    made = [commit_bare(repo, step=step) for step in range(2)]
    behind = repository(tmp_path / "behind", repo.storage, seed=3)
    look(behind, RUN)
    made += [commit_bare(repo, step=step) for step in range(2, 4)]
    repo.storage.delete(announcement_key(RUN, 2))
    assert newest(behind, "run", is_visible) == made[1]
    gc = repository(tmp_path / "gc", repo.storage, seed=4)
    assert [key for key, _ in faults(gc, list_commits(gc), anew=False)] == [
        announcement_key(RUN, 2),
        commit_key(made[2].txid),
    ]
    assert verify(gc).records
    settle(gc, HOUR, [])
    assert newest(behind, "run", is_visible) == made[3]
    assert made[2].txid in known(repo, tmp_path).announced
    assert not verify(gc).records


def test_damaged_announcements_are_reported(repo: Repository) -> None:
    commit_bare(repo)
    key = announcement_key(RUN, 0)
    repo.storage.delete(key)
    repo.storage.put(key, b"torn")
    assert faults(repo, list_commits(repo), anew=False) == []  # this host has cached it
    found = [one.key for one in verify(repo).records]
    assert found[0] == key


def test_gc_deletes_the_marks_of_blobs_that_it_deletes(repo: Repository) -> None:
    one, two = (save(repo, step=step, texts=[str(step)]) for step in range(2))
    for commit in (one, two):
        for uploader, blob, _ in manifests.blobs_of(repo, commit):
            blobs.mark_damaged(repo, uploader, blob, "for a test")
            blobs.mark_repaired(repo, uploader, blob, "for a test")
    commits.forget(repo, one)
    collect(repo, min_age=0)
    assert {entry.key.split("/")[1] for entry in repo.storage.list("damaged/")} == {two.txid}


def saved(repo: Repository, step: int) -> commits.Commit:
    transaction = begin(repo, "run", step)
    finish(repo, transaction, [f"of {step}"], [])
    made = commits.read_log(repo, transaction.txid)
    assert made is not None
    return made


def change_all(repo: Repository) -> None:
    """Save a checkpoint, make each possible change to it, and run a gc that purges two commits at once."""
    one, two, three = (saved(repo, step) for step in range(3))
    commits.restore(repo, commits.forget(repo, one))
    for commit in (two, three):
        commits.forget(repo, commit)
    collect(repo, min_age=0)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_a_process_killed_at_any_call_leaves_nothing_unannounced_after_gc(
    tmp_path: Path, part: int, full: bool
) -> None:
    whole = Deadly(memory())
    change_all(repository(tmp_path / "whole", whole))
    assert undecided(repository(tmp_path / "whole", whole.inner)) == []
    for at in range(1 + part, whole.steps + 1, 4 if full else 12):
        storage = Deadly(memory(), at)
        with pytest.raises(Killed):
            change_all(repository(tmp_path / f"{at}", storage))
        after = repository(tmp_path / f"{at} after", storage.inner, seed=2, clock=Ticks(START + 10**9))
        assert untold(after) == []
        collect(after, min_age=0, revoke_after=0)
        assert undecided(after) == []
        assert untold(after) == []
        numbers = [number for number, _ in announcements(after, RUN)]
        assert numbers == list(range(len(numbers)))
