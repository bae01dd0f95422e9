"""Whether a checkpoint is safe in the mirror: by key and by a listing, after changes in both stores."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from casckpt.contents.refs import resolve
from casckpt.format import records
from casckpt.format.keys import commit_key, copied_txid, ended_key, transaction_key
from casckpt.format.records import Began
from casckpt.history import commits
from casckpt.history.commits import Commit, forget, list_commits, purge, read_log, restore, trim
from casckpt.history.ended import line_of, write_list
from casckpt.history.transactions import revoke
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.copies import mirrored
from casckpt.upkeep.copies.mirrored import ask
from casckpt.upkeep.copies.replication import Work, replicate
from casckpt.upkeep.gc.gc import execute as execute_gc
from casckpt.upkeep.gc.gc import plan_gc
from casckpt.upkeep.thin import execute, plan_thin
from tests.support.checkpoints import array, save_parts
from tests.support.copies import copy as copy_all
from tests.support.far import FarStore
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.gcs import collect
from tests.support.repositories import Ticks, commit_bare, meanwhile, memory, repository

FOR_MIRROR = Work(jobs=1, for_mirror=True)


class Pair(NamedTuple):
    """A store and its mirror, which may be reached over ``link``."""

    here: Repository
    there: Repository
    link: FarStore
    many: bool

    def save(self, step: int = 0) -> Commit:
        return save_parts(self.here, {"w": array(step)}, {"optim.a": array(8)}, {"optim.b": array(9)}, step=step)

    def copy(self, commit: Commit) -> Commit:
        return replicate(self.here, self.there, commit, FOR_MIRROR)

    def is_safe(self, commit: Commit) -> bool:
        answer = ask(self.here, [commit], many=self.many)
        assert answer.found is not False
        return not answer.unsafe


@pytest.fixture(params=[False, True], ids=["by key", "by listing"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Pair:
    inner, clock = memory(), Ticks()
    link = FarStore(inner)
    here = repository(tmp_path / "here", clock=clock, mirror=link)
    there = repository(tmp_path / "there", inner, clock=clock, seed=2)
    here.change_settings(mirror=link.url)
    return Pair(here, there, link, request.param)


def thin(repo: Repository, commit: Commit, drop: str = "optim.*") -> Commit:
    (made,) = execute(repo, plan_thin(repo, [commit], drop=drop))
    return made


def test_a_checkpoint_is_safe_once_the_mirror_has_had_it(pair: Pair) -> None:
    commit = pair.save()
    assert not pair.is_safe(commit)
    copy = pair.copy(commit)
    assert pair.is_safe(commit)
    gone = forget(pair.here, commit)
    purge(pair.there, forget(pair.there, copy))
    assert pair.is_safe(commit)
    assert pair.is_safe(gone), "the mirror has its own retention"


def test_a_restored_checkpoint_is_safe_only_while_the_mirror_has_it(pair: Pair) -> None:
    copy = pair.copy(pair.save())
    back = restore(pair.here, forget(pair.here, resolve(pair.here, "run@0")))
    assert pair.is_safe(back)
    hidden = forget(pair.there, copy)
    assert pair.is_safe(back), "it was forgotten by a rule of the mirror"
    purge(pair.there, hidden)
    assert not pair.is_safe(back)
    again = pair.copy(back)
    assert again.txid == copied_txid(back.txid, 1)
    assert pair.is_safe(back)


def test_a_copy_that_is_still_hidden_after_a_restore_does_not_count(pair: Pair) -> None:
    hidden = forget(pair.here, pair.save())
    copy = forget(pair.there, pair.copy(hidden))
    assert pair.is_safe(hidden)
    back = restore(pair.here, hidden)
    assert not pair.is_safe(back), "the mirror would purge it"
    assert pair.copy(back).txid == copy.txid
    assert pair.is_safe(back)
    assert resolve(pair.there, "run@0").visible


def test_all_existing_entries_must_be_in_the_mirror(pair: Pair) -> None:
    whole = pair.save()
    made = thin(pair.here, whole)
    copy = pair.copy(made)
    assert copy.dropped is not None
    assert not pair.is_safe(made)
    (left,) = ask(pair.here, [made], many=pair.many).unsafe
    assert left.places == whole.places, "the fullest are to be copied"
    pair.here.change_settings(mirror_thinned=True)
    assert pair.is_safe(made)
    pair.here.change_settings(mirror_thinned=None)
    assert pair.copy(left).txid == copy.txid
    assert pair.is_safe(made), "its copy was completed"
    assert pair.is_safe(trim(pair.here, made))


def test_a_mirror_may_thin_by_its_own_rule_unless_entries_were_brought_back(pair: Pair) -> None:
    whole = pair.save()
    copy = pair.copy(whole)
    trim(pair.there, thin(pair.there, copy))
    assert pair.is_safe(whole)
    thin(pair.here, whole)
    back = restore(pair.here, resolve(pair.here, "run@0").old[0])
    assert not pair.is_safe(back)
    assert pair.copy(back).txid == copy.txid
    assert pair.is_safe(back)


def test_a_store_that_was_filled_and_thinned_before_it_became_the_mirror_counts(pair: Pair) -> None:
    pair.here.change_settings(mirror=None)
    commit = pair.save()
    copy_all(pair.here, pair.there)
    trim(pair.there, thin(pair.there, resolve(pair.there, "run@0")))
    assert collect(pair.there).deleted_blobs > 0
    pair.here.change_settings(mirror=pair.link.url)
    assert pair.is_safe(commit)
    assert pair.is_safe(thin(pair.here, commit))
    assert pair.is_safe(forget(pair.here, resolve(pair.here, "run@0")))


def test_more_dropped_patterns_leave_fewer_entries(pair: Pair) -> None:
    some = trim(pair.here, thin(pair.here, pair.save(), "optim.a"))
    pair.copy(some)
    fewer = thin(pair.here, some, "optim.b")
    assert pair.is_safe(fewer)


def end(repo: Repository, copy: Commit, days: int) -> None:
    """Purge a copy, and do with its log what a gc does later. (If it is young, an earlier version erased its run.)"""
    now = commits.refresh(repo, copy)
    gone = purge(repo, now if now.is_forgotten else forget(repo, now))
    assert isinstance(repo.clock, Ticks)
    repo.clock.advance(days * 24 * 3600)
    write_list(repo, {gone.txid: line_of(gone)})
    for number in range(gone.number + 1 if days else 1):
        repo.storage.delete(commit_key(gone.txid, number))


@pytest.mark.parametrize("days", [0, 31])
def test_a_copy_whose_log_is_over_counts_if_it_had_all_entries(pair: Pair, days: int) -> None:
    commit = pair.save()
    end(pair.there, pair.copy(commit), days)
    assert pair.is_safe(commit)
    assert pair.is_safe(forget(pair.here, commit)), "the mirror has its own retention"
    back = restore(pair.here, commits.refresh(pair.here, commit))
    assert not pair.is_safe(back)
    assert pair.copy(back).txid == copied_txid(commit.txid, 1)
    assert pair.is_safe(back)


@pytest.mark.parametrize("days", [0, 31])
def test_a_thinned_copy_whose_log_is_over_does_not_count(pair: Pair, days: int) -> None:
    whole = pair.save()
    made = thin(pair.here, whole)
    end(pair.there, pair.copy(made), days)
    assert not pair.is_safe(made)
    assert pair.copy(made.at(whole.places)).txid == copied_txid(whole.txid, 1)
    assert pair.is_safe(made)


def test_a_late_record_of_a_copy_whose_log_is_over_does_not_count(pair: Pair) -> None:
    """A copier slept, and its blobs were deleted meanwhile."""
    commit = pair.save()
    record = pair.copy(commit).committed
    revoked = records.RevokedRecord(txid=commit.txid, time=1, reason="for a test")
    pair.there.storage.delete(commit_key(commit.txid))
    pair.there.put_record(commit_key(commit.txid), revoked)
    (copy,) = list_commits(pair.there.fresh()).commits.values()
    assert isinstance(pair.there.clock, Ticks)
    pair.there.clock.advance(31 * 24 * 3600)
    write_list(pair.there, {copy.txid: line_of(copy)})
    pair.there.storage.delete(commit_key(commit.txid))
    pair.there.put_record(commit_key(commit.txid), record)
    assert not pair.is_safe(commit)


def test_nothing_is_safe_if_a_list_of_the_mirror_cannot_be_read(pair: Pair) -> None:
    commit = pair.save()
    pair.link.inner.put(ended_key(0), b"torn")
    before = len(pair.link.calls)
    assert not pair.is_safe(commit)
    assert len(pair.link.calls) < before + 9


def test_a_trim_needs_only_the_entries_that_it_ends(pair: Pair) -> None:
    whole = pair.save()
    made = thin(pair.here, whole)
    (old,) = made.old
    assert not pair.is_safe(old)
    pair.here.change_settings(mirror_thinned=True)
    before = len(pair.link.calls)
    assert not ask(pair.here, [old]).unsafe
    assert len(pair.link.calls) == before, "what goes need not be there, so this is no question"


def test_numbers_without_a_usable_log_do_not_end_the_search(pair: Pair) -> None:
    """A copy of other places may have died, or been revoked, or lost its record. A save may have the transaction."""
    commit = pair.save()
    txids = [copied_txid(commit.txid, number) for number in range(5)]
    dead = Began(
        txid=txids[0], run=commit.run, step=commit.step, time=1, process=this_process(), manifest=commit.id,
        places=txids[4],
    )  # fmt: skip
    pair.there.put_record(transaction_key(txids[0]), dead)
    revoke(pair.there, txids[1], "for a test")
    pair.there.storage.put(commit_key(txids[2]), b"damaged")
    commit_bare(pair.there, commit.run, commit.step, txid=txids[3])
    assert not pair.is_safe(commit)
    assert pair.copy(commit).txid == txids[4]
    assert pair.is_safe(commit)


def test_a_copy_of_the_mirror_counts_as_copied(pair: Pair, tmp_path: Path) -> None:
    """A lost store is copied back from its mirror."""
    commit = pair.save()
    pair.copy(commit)
    other = repository(tmp_path / "other", clock=pair.here.clock, seed=3, mirror=pair.link)
    other.change_settings(mirror=pair.link.url)
    replicate(pair.there, other, commit_of(pair.there, commit), FOR_MIRROR)
    assert pair._replace(here=other).is_safe(commit_of(other, commit))


def commit_of(repo: Repository, commit: Commit) -> Commit:
    found = read_log(repo, commit.txid)
    assert found is not None
    return found


def test_nothing_is_safe_without_an_answer(pair: Pair) -> None:
    commit = pair.save()
    assert ask(pair.here, []).found is None
    pair.copy(commit)
    pair.link.inject(fail_before("get", times=9), fail_before("list", times=9))
    answer = ask(pair.here, [commit], many=pair.many)
    assert (answer.unsafe, answer.found) == ([commit], None)
    assert f"casckpt cannot ask the mirror {pair.link.url} (" in answer.problem
    pair.link.heal()
    pair.here.mirror = None
    pair.here.change_settings(mirror="no-such-scheme://place")
    assert ask(pair.here, [commit], many=pair.many).unsafe
    pair.here.change_settings(mirror="memory://nothing")
    answer = ask(pair.here, [commit], many=pair.many)
    assert (answer.unsafe, answer.found, answer.problem) == (
        [commit], False, "there is no store at the mirror memory://nothing",
    )  # fmt: skip
    pair.here.change_settings(mirror=None)
    assert ask(pair.here, [commit], many=True) == mirrored.Answer()


def test_an_answer_is_never_remembered(pair: Pair) -> None:
    commit = pair.save()
    copy = pair.copy(commit)
    assert pair.is_safe(commit)
    for entry in list(pair.link.inner.list("commits/")):
        pair.link.inner.delete(entry.key)
    assert not pair.is_safe(commit)
    pair.link.inner.put(commit_key(copy.txid), b"damaged")
    assert not pair.is_safe(commit)


def test_gc_does_not_purge_what_has_changed_since_it_asked(pair: Pair) -> None:
    """The mirror has purged its copy, which counts only until the checkpoint is restored here."""
    gone = forget(pair.here, pair.save())
    copy = pair.copy(gone)
    purge(pair.there, forget(pair.there, copy))
    plan = plan_gc(pair.here, min_age=0.0)
    assert [one.txid for one in plan.purge] == [gone.txid]
    change = meanwhile(lambda: forget(pair.here, restore(pair.here, gone)))
    pair.link.inject(call_first("get", change, key=commit_key(copy.txid)))
    assert execute_gc(pair.here, plan, wait=0.0).purged == ()
    assert [one.reason for one in plan_gc(pair.here, min_age=0.0).waiting] == ["unmirrored"]


def test_a_question_is_one_small_request_or_one_listing(pair: Pair) -> None:
    every = [pair.save(step) for step in range(3)]
    copies = [pair.copy(commit) for commit in every]
    forget(pair.there, copies[0])
    keys = [commit_key(commit.txid) for commit in every]
    for reads_of_listed in (4, 0):
        before = len(pair.link.calls)
        assert not ask(pair.here, every, many=pair.many).unsafe
        calls = [call for call in pair.link.calls[before:] if call.key.startswith("commits")]
        if pair.many:
            assert [call.method for call in calls] == ["list", *["get"] * reads_of_listed]
        else:
            assert sorted((call.method, call.key) for call in calls) == [("get", key) for key in keys]


def test_the_records_of_a_mirror_in_a_folder_are_durable_before_they_count(tmp_path: Path) -> None:
    """It may lose power before it is made durable, so it is asked again."""
    here = repository(tmp_path / "here")
    link = FaultyStore(LocalStore(tmp_path / "mirror"))
    there = repository(tmp_path / "there", link, clock=here.clock, seed=2)
    here.mirror = link
    here.change_settings(mirror=link.url)
    commit = save_parts(here, {"w": array(1)})
    replicate(here, there, commit, FOR_MIRROR)
    key = commit_key(commit.txid)
    before = len(link.calls)
    assert not ask(here, [commit]).unsafe
    calls = [(call.method, call.key) for call in link.calls[before:]]
    assert calls == [("size", "casckpt.json"), ("get", key), ("settle", "commits"), ("get", key)]
    link.inject(call_first("settle", meanwhile(lambda: link.inner.delete(key))))
    assert ask(here, [commit]).unsafe == [commit]
