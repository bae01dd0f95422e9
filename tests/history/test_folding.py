"""Logs, folded to the state and the places of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casckpt.contents.refs import resolve
from casckpt.errors import Conflict, Damaged, Revoked
from casckpt.format.keys import commit_key
from casckpt.format.names import TxId
from casckpt.format.records import Back, Dropped, Restored
from casckpt.history.commits import (
    Commit,
    bring_back,
    forget,
    keep,
    list_commits,
    purge,
    purge_unreadable,
    read_log,
    record_tag,
    refresh,
    restore,
    trim,
)
from casckpt.history.folding import Places
from casckpt.history.following import at_step, is_visible, look_at_all, newest, newest_of_runs, newest_reusable
from casckpt.history.transactions import revoke
from casckpt.repository.repository import Repository
from casckpt.storage.base import Known, ListedObject
from tests.support.faulty import FaultyStore
from tests.support.repositories import START, Ticks, commit_bare, manifest_id, memory, now, repository, rewrite_bare

THIN = Dropped(entries=1, bytes=4, rule="--drop optim.*")


def names(places: tuple[Places, ...]) -> list[TxId]:
    return [one.txid for one in places]


def test_a_log_names_places_and_which_of_them_are_current(repo: Repository) -> None:
    base = commit_bare(repo)
    moved = rewrite_bare(repo, base)
    thin = rewrite_bare(repo, moved, dropped=THIN)
    first, second, third = names(thin.existing)
    assert (first, thin.places.txid, thin.ended) == (base.txid, third, ())
    back = bring_back(repo, thin, thin.existing[1])
    assert now(repo, base) == back
    assert (back.places.txid, names(back.existing), back.restored) == (second, [first, second, third], 3)
    trimmed = trim(repo, back)
    assert now(repo, base) == trimmed
    assert (names(trimmed.existing), names(trimmed.ended)) == ([second], [first, third])
    gone = purge(repo, forget(repo, trimmed))
    assert now(repo, base) == gone
    assert (gone.existing, sorted(names(gone.ended)), gone.live) == ((), sorted([first, second, third]), False)


def test_the_same_records_fold_to_the_same_state_from_any_number_on(repo: Repository) -> None:
    base = commit_bare(repo)
    states = [base, rewrite_bare(repo, base)]
    for act in (forget, restore, trim, forget, purge):
        states.append(act(repo, states[-1]))
    assert [refresh(repo, one) for one in states] == [now(repo, base)] * len(states)


def test_places_that_ended_cannot_be_brought_back(repo: Repository) -> None:
    made = rewrite_bare(repo, commit_bare(repo))
    (old,) = made.old
    trimmed = trim(repo, made)
    with pytest.raises(Conflict, match="gone for good"):
        bring_back(repo, trimmed, old.places)
    assert restore(repo, old).places == made.places, "a visible checkpoint stays as it is"


def test_a_record_that_brings_back_ended_places_changes_no_places(repo: Repository) -> None:
    trimmed = trim(repo, rewrite_bare(repo, commit_bare(repo)))
    (ended,) = trimmed.ended
    key = commit_key(trimmed.txid, trimmed.number + 1)
    repo.put_record(key, Back(txid=trimmed.txid, time=START, who="late", to=ended.txid))
    after = now(repo, trimmed)
    assert (after.places, after.existing) == (trimmed.places, trimmed.existing)


def test_one_of_two_changes_wins(repo: Repository) -> None:
    made = rewrite_bare(repo, commit_bare(repo))
    forget(repo, made)
    for act in (trim, lambda repo, one: bring_back(repo, one, one.existing[0])):
        with pytest.raises(Conflict):
            act(repo, made)
    assert len(now(repo, made).existing) == 2


@pytest.mark.parametrize("change", [lambda repo, one: record_tag(repo, one, "a", 0), rewrite_bare])
def test_a_change_never_follows_another_that_its_writer_has_not_read(
    repo: Repository, change: Callable[[Repository, Commit], Commit]
) -> None:
    base = commit_bare(repo)
    changed = change(repo, base)
    for act in (forget, trim):
        with pytest.raises(Conflict, match="has just changed"):
            act(repo, base)
    assert now(repo, base) == changed


def test_nothing_changes_a_purged_checkpoint(repo: Repository) -> None:
    gone = purge(repo, forget(repo, commit_bare(repo)))
    key = commit_key(gone.txid, gone.number + 1)
    repo.put_record(key, Restored(txid=gone.txid, time=START, who="late"))
    assert not now(repo, gone).live


def test_a_kept_record_only_uses_its_number(repo: Repository) -> None:
    base = commit_bare(repo)
    keep(repo, base.txid, 1)
    assert forget(repo, base).number == 2
    assert now(repo, base).last == "forgotten"


def test_a_forgotten_twin_does_not_answer_even_if_it_has_more_entries(repo: Repository) -> None:
    whole, _, thin = (commit_bare(repo, manifest=manifest_id(one)) for one in ("x", "y", "x"))
    thin = rewrite_bare(repo, thin, dropped=THIN)
    forget(repo, whole)
    listed = list_commits(repo)
    assert listed.at("run", 0) == thin
    assert listed.current() == [thin]
    assert resolve(repo, "run@0") == thin


def test_a_commit_shows_other_places(repo: Repository) -> None:
    made = rewrite_bare(repo, commit_bare(repo), dropped=THIN)
    (old,) = made.old
    assert (old.id, old.is_old_places, old.visible, old.is_forgotten) == (made.id, True, False, False)
    assert (old.dropped, made.dropped) == (None, THIN)
    assert old.at(made.places) == made
    assert list_commits(repo).placed() == [old, made]
    assert refresh(repo, old) == made
    assert (old.places.holds(made.places), made.places.holds(old.places)) == (True, False)
    assert max([old, made], key=lambda one: one.rank) == made, "what is visible answers"


def test_a_revoked_transaction_has_no_places(repo: Repository) -> None:
    txid = repo.new_txid("a", 1)
    revoke(repo, txid, "dead")
    commit = list_commits(repo).commits[txid]
    assert (commit.live, commit.existing, str(commit)) == (False, (), txid)
    with pytest.raises(Revoked, match="dead"):
        commit.places  # noqa: B018 - it raises
    assert list_commits(repo).ended == {txid}


def test_a_listing_knows_which_transactions_have_a_record(repo: Repository) -> None:
    made = rewrite_bare(repo, commit_bare(repo))
    trimmed = trim(repo, made)
    listed = list_commits(repo)
    assert listed.recorded == {made.txid, made.places.txid}
    assert listed.ended == {made.txid}
    assert listed.names == {(made.txid, number) for number in range(trimmed.number + 1)}


# order


def test_a_rewrite_does_not_change_the_order(tmp_path: Path) -> None:
    storage = memory()
    ahead = repository(tmp_path / "ahead", storage, clock=Ticks(START + 600 * 10**6))
    repo = repository(tmp_path / "behind", storage, seed=2)
    one, two, three = (commit_bare(repo, "a", step) for step in (1, 2, 3))
    commit_bare(repo, "b", 1)
    made = rewrite_bare(ahead, two)
    assert made.places.txid > three.txid
    for host in (ahead, repo, repository(tmp_path / "new", storage, seed=3)):
        assert resolve(host, "a@latest").txid == three.txid
        assert newest(host, "a", is_visible) == three
        assert newest_reusable(host, "a", anew=True) == now(host, three)
        assert [c.txid for c in list_commits(host).visible() if c.run == "a"] == [one.txid, two.txid, three.txid]
        assert next(c.txid for c in newest_of_runs(host, is_visible) if c.run == "a") == three.txid


def test_a_step_resolves_to_the_twin_that_was_saved_last(repo: Repository) -> None:
    one, two = (commit_bare(repo, "a", 1) for _ in range(2))
    rewrite_bare(repo, one)
    assert resolve(repo, "a@1").txid == two.txid
    assert [c.txid for c in list_commits(repo).current()] == [two.txid]
    assert at_step(repo, look_at_all(repo, "a"), "a", 1, is_visible)[-1] == two


# listings that lack records, and damage


class Torn(FaultyStore):
    """Storage whose listings of commits/ lack the matching keys."""

    hides: Callable[[str], bool] | None = None

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        hides = self.hides if prefix == "commits/" else None
        return (entry for entry in super().list(prefix, known=known) if hides is None or not hides(entry.key))


def test_missing_lower_numbers_of_a_log_are_read_by_their_keys(tmp_path: Path) -> None:
    storage = Torn(memory())
    repo = repository(tmp_path, storage)
    made = rewrite_bare(repo, commit_bare(repo))
    last = forget(repo, bring_back(repo, made, made.existing[0]))
    assert last.number == 3
    storage.hides = lambda key: key in (commit_key(made.txid, 1), commit_key(made.txid, 2))
    found = list_commits(repository(tmp_path / "new", storage, seed=5))
    assert (found.damaged, found.commits[made.txid]) == ({}, last)


@pytest.mark.parametrize("how", ["torn", "lost"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_record_that_cannot_be_read_puts_the_checkpoint_in_doubt(
    tmp_path: Path, repo: Repository, number: int, how: str
) -> None:
    made = rewrite_bare(repo, commit_bare(repo))
    restore(repo, forget(repo, made))
    repo.storage.delete(commit_key(made.txid, number))
    if how == "torn":
        repo.storage.put(commit_key(made.txid, number), b"torn")
    for host in (repo, repository(tmp_path / "new", repo.storage, seed=5)):
        assert set(list_commits(host).damaged) == {made.txid}
    if how == "torn":
        with pytest.raises(Damaged):
            read_log(repo, made.txid)
    purge_unreadable(repo, made.txid)
    assert list_commits(repo).damaged == {}
