"""A gc that finishes leaves one note, and a note that cannot be written is no failure."""

from __future__ import annotations

import pytest

from casckpt.format.keys import ran_key
from casckpt.format.records import Ran
from casckpt.history.transactions import begin
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.gc import last_gc
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.gcs import LAST, keys, run_gc
from tests.support.repositories import commit_draft, draft, meanwhile, put_blob


def save(repo: Repository, step: int) -> None:
    commit_draft(repo, repo.new_txid("a", step), draft([], "a", step))


def test_a_gc_that_finishes_notes_who_ran_it_and_what_it_left(repo: Repository) -> None:
    assert last_gc(repo) is None
    for step in (1, 2, 3):
        save(repo, step)
    repo.user = "ann"
    put_blob(repo, begin(repo, "a", 4).txid, "of a save in progress")
    run_gc(repo, LAST, dry_run=True)
    assert last_gc(repo) is None
    run_gc(repo, LAST, min_age=3600, wait=0)
    ran = last_gc(repo)
    assert isinstance(ran, Ran)
    assert (ran.who, ran.waiting, ran.refused, ran.opened) == (repo.who, 2, 0, 1)


def test_only_the_newest_note_is_kept(repo: Repository) -> None:
    save(repo, 1)
    for number in range(3):
        run_gc(repo)
        assert keys(repo, "ran/") == {f"ran/{number}"}


def test_a_note_costs_a_listing_a_put_and_a_delete(repo: Repository, faults: FaultyStore) -> None:
    run_gc(repo)
    faults.calls.clear()
    run_gc(repo)
    calls = [call.method for call in faults.calls if call.key.startswith("ran/")]
    assert calls == ["list", "put", "delete"]


def test_no_note_is_left_where_a_store_was_moved_away(repo: Repository, faults: FaultyStore) -> None:
    """Regression: the note created the store's folder again, and moving the store back put it into that folder."""
    save(repo, 1)
    for key in keys(repo, ""):
        faults.inner.delete(key)
    run_gc(repo)
    assert keys(repo, "") == set()


@pytest.mark.parametrize("method", ["list", "put", "delete"])
def test_a_note_that_cannot_be_written_is_no_failure_of_the_gc(
    repo: Repository, faults: FaultyStore, method: str
) -> None:
    save(repo, 1)
    run_gc(repo)
    faults.inject(fail_before(method, key="ran/*"))
    assert run_gc(repo).refused == ()
    assert len(keys(repo, "ran/")) == 1 + (method == "delete")


def test_of_two_gcs_that_end_at_once_one_is_noted(repo: Repository, faults: FaultyStore) -> None:
    save(repo, 1)
    faults.inject(call_first("put", meanwhile(lambda: run_gc(repo)), key="ran/*"))
    run_gc(repo)
    assert keys(repo, "ran/") == {"ran/0"}


def test_a_note_that_another_gc_has_just_replaced_is_not_missing(repo: Repository, faults: FaultyStore) -> None:
    run_gc(repo)
    faults.inject(call_first("get", meanwhile(lambda: run_gc(repo)), key=ran_key(0)))
    assert isinstance(last_gc(repo), Ran)
