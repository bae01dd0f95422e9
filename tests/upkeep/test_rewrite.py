"""Rewrites: one record in the checkpoint's log changes its places, and one of several competing processes wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.contents.refs import resolve
from casckpt.errors import CasckptError, Conflict, Refused, StorageError
from casckpt.format.keys import commit_key, transaction_key
from casckpt.format.names import TxId
from casckpt.format.records import Began, Rewritten
from casckpt.history.commits import Commit, forget, list_commits, list_names, restore
from casckpt.history.leases import take
from casckpt.history.tags import named_by, set_tag, tags
from casckpt.history.transactions import closed_files, open_transactions
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.upkeep.rewrite import rewrite
from casckpt.upkeep.saves import revoke_save
from tests.support.announced import announcements
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.repositories import (
    commit_bare,
    half_rewrite,
    meanwhile,
    now,
    repository,
    rewrite_bare,
    rewritten_bare,
)


def visible(repo: Repository) -> list[TxId]:
    return [one.txid for one in list_commits(repo).visible()]


def files(repo: Repository) -> list[str]:
    return [entry.key for entry in repo.storage.list("transactions/")]


def test_a_rewrite_changes_the_places_and_nothing_else(repo: Repository) -> None:
    base = commit_bare(repo, "a", 1)
    later = commit_bare(repo, "a", 2)
    made = rewrite_bare(repo, base, bytes_coded=7)
    assert now(repo, base) == made
    assert (made.id, made.txid, made.last, made.changed_at) == (base.id, base.txid, "committed", base.changed_at)
    assert (made.committed.bytes_coded, base.committed.bytes_coded) == (7, 0)
    assert [one.places for one in made.old] == [base.places]
    assert visible(repo) == [base.txid, later.txid]
    assert list_commits(repo).superseded() == []
    for ref in (base.id, "a@1", base):
        assert resolve(repo, ref) == made
    assert resolve(repo, "a@latest") == resolve(repo, "latest") == later
    again = rewrite_bare(repo, made)
    assert [one.places for one in again.old] == [base.places, made.places]
    assert files(repo) == []
    assert announcements(repo) == [(0, [(base.txid, 0)]), (1, [(later.txid, 0)])], "a rewrite is not announced"


def test_a_rewritten_checkpoint_can_be_forgotten_and_restored(repo: Repository) -> None:
    made = rewrite_bare(repo, commit_bare(repo))
    forgotten = forget(repo, made)
    assert visible(repo) == []
    assert restore(repo, forgotten).places == made.places


# who wins


def in_between(faults: FaultyStore, base: Commit, act: Callable[[], object]) -> None:
    """Let a different process act right before the record that commits a rewrite."""
    faults.inject(call_first("put", meanwhile(act), key=f"{commit_key(base.txid)}.1"))


def other(tmp_path: Path, repo: Repository, seed: int = 7) -> Repository:
    """Open the store in a process on a different host."""
    storage = repo.storage
    assert isinstance(storage, FaultyStore)
    return repository(tmp_path / f"other {seed}", storage.inner, seed=seed, clock=repo.clock)


@pytest.mark.parametrize("act", [forget, rewrite_bare, lambda repo, base: set_tag(repo, "best", base)])
def test_whoever_takes_the_slot_first_wins(
    tmp_path: Path, repo: Repository, faults: FaultyStore, act: Callable[[Repository, Commit], object]
) -> None:
    base = commit_bare(repo)
    in_between(faults, base, lambda: act(other(tmp_path, repo), base))
    with pytest.raises(Conflict, match="not rewritten"):
        rewrite_bare(repo, base)
    assert now(repo, base).number == 1
    assert sorted(one.last for one in list_commits(repo).commits.values()) in (
        ["committed", "revoked"], ["forgotten", "revoked"],
    )  # fmt: skip
    assert files(repo) == []


@pytest.mark.parametrize("act", [forget, rewrite_bare])
def test_a_rewrite_of_an_older_state_changes_nothing(
    repo: Repository, act: Callable[[Repository, Commit], object]
) -> None:
    base = commit_bare(repo)
    act(repo, base)
    before = now(repo, base)
    for one in (base, before) if act is forget else (base,):
        with pytest.raises(Conflict, match="another process changed it"):
            rewrite_bare(repo, one)
    assert now(repo, base).existing == before.existing
    assert files(repo) == []


def test_a_change_after_the_rewrite_began_is_noticed_before_it_uploads(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)
    faults.inject(call_first("put", meanwhile(lambda: forget(other(tmp_path, repo), base)), key="transactions/*"))
    with pytest.raises(Conflict, match="another process changed it"):
        rewrite(repo, base, lambda txid: pytest.fail("it uploads"))


# lost answers


def test_a_rewriter_whose_response_was_lost_finds_that_it_succeeded(repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)
    faults.inject(fail_after("put", key=commit_key(base.txid, 1)))
    made = rewrite_bare(repo, base)
    assert (made.number, len(made.existing)) == (1, 2)
    assert files(repo) == []


def test_a_rewriter_that_gets_no_response_takes_its_slot_before_it_fails(repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)
    seen: list[Rewritten] = []

    def save(txid: TxId) -> Rewritten:
        seen.append(rewritten_bare(repo, base, txid))
        return seen[0]

    faults.inject(fail_before("put", key=commit_key(base.txid, 1)))
    with pytest.raises(StorageError):
        rewrite(repo, base, save)
    assert (now(repo, base).number, now(repo, base).existing) == (1, base.existing)
    with pytest.raises(Conflict):  # the delayed put
        repo.put_record(commit_key(base.txid, 1), seen[0])
    assert list_commits(repo).commits[seen[0].by].last == "revoked"
    assert files(repo) == []


def test_a_rewriter_that_cannot_find_out_leaves_its_transaction_open(repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)
    faults.inject(fail_before("put", key="commits/*", times=99))
    with pytest.raises(StorageError):
        rewrite_bare(repo, base)
    faults.heal()
    (opened,) = open_transactions(repo, list_names(repo))
    assert opened.began is not None
    assert opened.began.slot == (base.txid, 1)


# transactions of rewrites


def test_a_rewrite_is_open_while_its_slot_is_free(repo: Repository) -> None:
    base = commit_bare(repo)
    record = half_rewrite(repo, base)
    assert [one.txid for one in open_transactions(repo, list_names(repo))] == [record.by]
    assert closed_files(repo, list_names(repo)) == ({}, {record.by})
    repo.put_record(commit_key(base.txid, 1), record)
    assert open_transactions(repo, list_names(repo)) == []
    assert closed_files(repo, list_names(repo)) == ({transaction_key(record.by): record.by}, set())
    assert record.by not in list_commits(repo).commits, "it has committed, so it is not revoked"


def test_a_dead_rewrite_whose_slot_was_taken_is_revoked_before_its_file_goes(repo: Repository) -> None:
    base = commit_bare(repo)
    record = half_rewrite(repo, base)
    forget(repo, base)
    assert closed_files(repo, list_names(repo))[0] == {transaction_key(record.by): record.by}
    assert list_commits(repo).commits[record.by].last == "revoked"


def test_a_rewrite_whose_file_cannot_be_read_is_ended_in_every_possible_slot(repo: Repository) -> None:
    base, twin, elsewhere = (commit_bare(repo, "a", step) for step in (1, 1, 2))
    record = half_rewrite(repo, base)
    repo.storage.delete(transaction_key(record.by))
    repo.storage.put(transaction_key(record.by), b"torn")
    assert [one.began for one in open_transactions(repo, list_names(repo))] == [None]
    revoke_save(repo, record.by)
    with pytest.raises(Conflict):
        repo.put_record(commit_key(base.txid, 1), record)
    listed = list_commits(repo)
    assert [listed.commits[one.txid].number for one in (base, twin, elsewhere)] == [1, 1, 0]
    assert listed.commits[record.by].last == "revoked"


def test_a_committed_rewrite_whose_file_cannot_be_read_has_ended(repo: Repository) -> None:
    base = commit_bare(repo)
    record = half_rewrite(repo, base)
    repo.put_record(commit_key(base.txid, 1), record)
    repo.storage.delete(transaction_key(record.by))
    repo.storage.put(transaction_key(record.by), b"torn")
    assert open_transactions(repo, list_names(repo)) == []
    assert closed_files(repo, list_names(repo))[0] == {transaction_key(record.by): record.by}
    assert now(repo, base).places.txid == record.by


@pytest.mark.parametrize("wrong", [("b", 1), ("a", 2)])
def test_a_rewrite_has_the_run_and_step_of_its_checkpoint(repo: Repository, wrong: tuple[str, int]) -> None:
    base, txid = commit_bare(repo, "a", 1), repo.new_txid(*wrong)
    with pytest.raises(Refused, match="impossible"):
        rewritten_bare(repo, base, txid)
    process = this_process()
    with pytest.raises(Refused, match="impossible"):
        Began(txid=txid, run=wrong[0], step=wrong[1], time=0, process=process, slot=(base.txid, 1))


# tags


def test_tags_and_leases_stay_on_a_rewritten_checkpoint(repo: Repository) -> None:
    base = commit_bare(repo)
    set_tag(repo, "best", base)
    lease, _ = take(repo, base, 60)
    made = rewrite_bare(repo, now(repo, base))
    listed = list_commits(repo)
    assert [named_by(one, listed) for one in tags(repo).values()] == [made, made]
    assert resolve(repo, "tag:best") == made
    assert lease.txid == base.places.txid


def test_a_tag_can_be_set_on_a_checkpoint_that_was_just_rewritten(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)
    faults.inject(call_first("put", meanwhile(lambda: rewrite_bare(other(tmp_path, repo), base)), key="tags/*"))
    set_tag(repo, "best", base)
    assert now(repo, base).tagged == (("best", 0),)


def test_a_tag_restores_a_checkpoint_that_was_just_forgotten(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)
    faults.inject(call_first("put", meanwhile(lambda: forget(other(tmp_path, repo), base)), key="tags/*"))
    set_tag(repo, "best", base)
    assert resolve(repo, "tag:best").visible


def test_a_rewrite_that_fails_raises_its_own_error_and_leaves_no_file(repo: Repository) -> None:
    base = commit_bare(repo)

    def save(txid: TxId) -> Rewritten:
        raise CasckptError("no")

    with pytest.raises(CasckptError, match="no"):
        rewrite(repo, base, save)
    assert (now(repo, base).existing, files(repo)) == (base.existing, [])
