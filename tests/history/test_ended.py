"""Logs that are over: a line in commits/ended/ wins over every record, for readers of listings and of single logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.errors import Conflict, Damaged, Refused, Revoked
from casckpt.format.keys import commit_key, copied_txid, ended_key, transaction_key
from casckpt.format.records import Began, Ended, Restored, encode
from casckpt.history import commits, ended, tags
from casckpt.history.commits import Commit, forget, list_commits, purge, read_log, refresh
from casckpt.history.ended import find, line_of, write_list
from casckpt.history.folding import Over
from casckpt.history.transactions import begin, join, revoke
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.gc.candidates import commits_without_doubt
from casckpt.upkeep.rewrite import rewrite
from tests.support.faulty import FaultyStore, call_first, look_on
from tests.support.repositories import (
    Ticks,
    commit_bare,
    committed,
    meanwhile,
    memory,
    repository,
    rewrite_bare,
    rewritten_bare,
)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return repository(tmp_path, FaultyStore(memory()), clock=Ticks())


def store(repo: Repository) -> FaultyStore:
    assert isinstance(repo.storage, FaultyStore)
    return repo.storage


def sleep(repo: Repository, days: int = 31) -> None:
    assert isinstance(repo.clock, Ticks)
    repo.clock.advance(days * 24 * 3600)


def purged(repo: Repository, step: int = 0) -> Commit:
    return purge(repo, forget(repo, commit_bare(repo, step=step)))


def end(repo: Repository, *every: Commit) -> None:
    """Do what a gc does a month later."""
    sleep(repo)
    write_list(repo, {commit.txid: line_of(commit) for commit in every})
    drop(repo, *every)


def drop(repo: Repository, *every: Commit) -> None:
    for commit in every:
        for number in range(commit.number + 1):
            repo.storage.delete(commit_key(commit.txid, number))


def other_host(tmp_path: Path, repo: Repository, name: str = "other") -> Repository:
    return repository(tmp_path / name, repo.storage, clock=repo.clock, seed=len(name))


# readers


def test_a_log_that_is_over_is_neither_listed_nor_lost(
    tmp_path: Path, repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    kept, gone = commit_bare(repo, step=1), purged(repo)
    hosts = [repo, other_host(tmp_path, repo), repo.fresh()]
    for host in hosts[:2]:
        list_commits(host)
    end(repo, gone)
    for host in hosts:
        listed = list_commits(host)
        assert listed.commits.keys() == {kept.txid}
        assert listed.over == {gone.txid: Over(True, [])}
        assert {gone.txid} <= listed.recorded & listed.ended
        assert (gone.txid, 0) in listed.names
        assert not listed.damaged
        assert not any(gone.txid in row for row in host.catalogue.keys("commits/"))
        found = read_log(host, gone.txid)
        assert found is not None
        assert not found.live
        assert refresh(host, kept) == kept
    assert not caplog.records


@pytest.mark.parametrize("left", [(0,), (1, 2), (0, 1), (2,), (0, 1, 2), (0, 3)])
def test_a_line_wins_over_every_record(repo: Repository, left: tuple[int, ...]) -> None:
    """Records remain if a gc dies, and come back if a process slept, or if somebody copies old files back."""
    gone = purged(repo)
    records = {n: repo.storage.get(commit_key(gone.txid, n % 3), limit=1 << 20) for n in range(4)}
    end(repo, gone)
    for number in left:
        repo.storage.put(commit_key(gone.txid, number), records[number])
    for host in (repo, repo.fresh()):
        listed = list_commits(host)
        assert not listed.commits
        assert not listed.damaged
        assert listed.late == {(gone.txid, number) for number in left}
        found = read_log(host, gone.txid)
        assert found is not None
        assert not found.live


def test_a_copy_of_a_log_that_is_over_counts_as_purged(repo: Repository) -> None:
    before = commit_bare(repo)
    end(repo, purge(repo, forget(repo, before)))
    assert refresh(repo, before).last == "purged"
    assert not commits.exists(repo, before)


def test_all_places_of_a_log_that_is_over_are_recorded_and_ended(repo: Repository) -> None:
    one = rewrite_bare(repo, commit_bare(repo))
    two = purge(repo, forget(repo, one))
    end(repo, two)
    listed = list_commits(repo)
    assert {one.txid, one.places.txid} <= listed.ended & listed.recorded
    assert listed.over == {one.txid: Over(True, [one.places.txid])}


def test_a_log_that_gc_deletes_during_a_listing_is_over(repo: Repository) -> None:
    gone = purged(repo)
    sleep(repo)

    def finish() -> None:
        write_list(repo, {gone.txid: line_of(gone)})
        drop(repo, gone)

    reader = repository(Path(repo.cache_dir or "") / "reader", FaultyStore(store(repo).inner), clock=repo.clock)
    store(reader).inject(call_first("get", meanwhile(finish), key="commits/*"))
    listed = list_commits(reader)
    assert not listed.commits
    assert not listed.damaged
    assert listed.over


def test_a_log_that_gc_deletes_while_it_is_read_is_over(repo: Repository) -> None:
    """Otherwise, it would look as if the checkpoint was just committed."""
    gone = purged(repo)
    sleep(repo)

    def finish() -> None:
        write_list(repo, {gone.txid: line_of(gone)})
        drop(repo, gone)

    store(repo).inject(call_first("get", meanwhile(finish), key=f"{commit_key(gone.txid)}.1"))
    found = read_log(repo, gone.txid)
    assert found is not None
    assert not found.live


def test_a_folder_is_listed_before_its_subfolders(tmp_path: Path) -> None:
    """So a listing that lacks some records of a log, because gc deletes them meanwhile, has the log's line."""
    storage = LocalStore(tmp_path / "store")
    for key in ("commits/ended/0", *(f"commits/{number}" for number in range(9))):
        storage.put(key, b"x")
    assert [entry.key for entry in storage.list("commits/")][-1] == "commits/ended/0"


def test_readers_of_young_logs_do_not_look_for_lines(repo: Repository) -> None:
    one, two = commit_bare(repo), purged(repo, 1)
    sleep(repo, 19)
    store(repo).calls.clear()
    for commit in (one, two):
        read_log(repo, commit.txid)
        refresh(repo, commit)
    forget(repo, one)
    assert not store(repo).count("list")
    sleep(repo, 2)
    read_log(repo, one.txid)
    assert store(repo).keys("list") == [ended.PREFIX]


# backups and damage


def test_an_older_copy_of_the_store_is_noticed(
    tmp_path: Path, repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    commit_bare(repo, step=1)
    end(repo, purged(repo))
    list_commits(repo)
    repo.storage.delete(ended_key(0))
    assert not list_commits(other_host(tmp_path, repo)).over
    assert not caplog.records
    assert not list_commits(repo.fresh()).over
    assert f"{ended_key(0)} is gone" in caplog.text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"torn", "checksum"),
        (encode(Ended(time=1, store="another", ended=[])), "from another store"),
    ],
)
def test_a_list_that_cannot_be_read_is_reported(
    tmp_path: Path, repo: Repository, caplog: pytest.LogCaptureFixture, data: bytes, why: str
) -> None:
    kept, gone = commit_bare(repo, step=1), purged(repo)
    list_commits(repo)
    end(repo, gone)
    repo.storage.delete(ended_key(0))
    repo.storage.put(ended_key(0), data)
    for host in (repo, other_host(tmp_path, repo)):
        listed = list_commits(host)
        assert kept.txid in listed.commits
        assert [name for name, error in listed.damaged.items() if why in str(error)] == ["ended/0"]
        with pytest.raises((Damaged, Refused), match=why):
            find(host, gone.txid)
        with pytest.raises(Damaged, match="or delete it: it only lists checkpoints that are gone"):
            commits_without_doubt(host)
    assert not caplog.records


def test_lists_get_numbers_of_their_own(tmp_path: Path, repo: Repository) -> None:
    one, two = purged(repo), purged(repo, 1)
    other = other_host(tmp_path, repo)
    lines = {two.txid: line_of(two)}
    store(repo).inject(call_first("put", meanwhile(lambda: write_list(other, lines)), key="commits/ended/*"))
    write_list(repo, {one.txid: line_of(one)})
    assert {entry.key for entry in repo.storage.list(ended.PREFIX)} == {ended_key(0), ended_key(1)}
    assert list_commits(repo).over.keys() == {one.txid, two.txid}


# processes that slept


def test_a_save_that_slept_for_a_month_fails(repo: Repository) -> None:
    transaction = begin(repo, "run", 0)
    revoke(repo, transaction.txid, "it shows no sign of life")
    repo.storage.delete(transaction_key(transaction.txid))
    end(repo, list_commits(repo).commits[transaction.txid])
    with pytest.raises(Revoked, match="long ago"):
        transaction.commit(committed(repo, txid=transaction.txid))
    assert not list_commits(repo).commits


def test_a_rewrite_that_slept_for_a_month_fails(repo: Repository) -> None:
    base = commit_bare(repo)

    def save(txid: str) -> object:
        made = rewritten_bare(repo, base, txid)  # type: ignore[arg-type]  # a txid
        commits.keep(repo, base.txid, 1)
        revoke(repo, made.by, "it shows no sign of life")
        repo.storage.delete(transaction_key(made.by))
        end(repo, purge(repo, forget(repo, refresh(repo, base))))
        return made

    with pytest.raises(Conflict, match="it was purged"):
        rewrite(repo, base, save)  # type: ignore[arg-type]  # the record of a rewrite
    assert not [one for one in list_commits(repo).commits.values() if one.live]


def test_a_rewrite_of_a_log_that_is_over_fails(repo: Repository) -> None:
    base = commit_bare(repo)
    end(repo, purge(repo, forget(repo, base)))
    with pytest.raises(Conflict, match="another process changed it"):
        rewrite_bare(repo, base)


@pytest.mark.parametrize(
    "change",
    [
        lambda repo, one: commits.add(repo, one, Restored(txid=one.txid, time=repo.clock(), who="x")),
        lambda repo, one: commits.record_tag(repo, one, "best", 0),
        lambda repo, one: commits.bring_back(repo, one, one.existing[0]),
    ],
    ids=["restore", "tag", "bring back"],
)
def test_a_change_that_slept_for_a_month_fails(
    repo: Repository, change: Callable[[Repository, Commit], object]
) -> None:
    one = forget(repo, rewrite_bare(repo, commit_bare(repo)))
    end(repo, purge(repo, one))
    with pytest.raises(Conflict, match="gone for good"):
        change(repo, one)
    assert not list_commits(repo).commits


def test_a_checkpoint_that_is_over_cannot_be_tagged(repo: Repository) -> None:
    one = commit_bare(repo)
    end(repo, purge(repo, forget(repo, one)))
    with pytest.raises(Conflict, match="just purged"):
        tags.set_tag(repo, "best", one)
    assert not tags.tags(repo)


@pytest.mark.parametrize("days", [0, 31])
def test_a_copy_never_takes_the_transaction_of_a_log_that_is_over(repo: Repository, days: int) -> None:
    gone = purged(repo)
    sleep(repo, days)
    write_list(repo, {gone.txid: line_of(gone)})  # a young one was erased
    drop(repo, gone)

    def copy(number: int) -> Began:
        return Began(
            txid=copied_txid(gone.txid, number), run="run", step=0, time=repo.clock(), process=this_process(),
            manifest=gone.id, places=gone.txid,
        )  # fmt: skip

    assert join(repo, copy(0)) is None
    assert not list(repo.storage.list("transactions/"))
    joined = join(repo, copy(1))
    assert joined is not None
    joined.abort("this test is over")


def test_a_copy_that_was_chosen_before_the_log_was_over_does_not_begin(repo: Repository) -> None:
    """A gc that lists transactions/ before the copy begins deletes the log afterwards."""
    gone = purged(repo)
    sleep(repo)
    began = Began(
        txid=gone.txid, run="run", step=0, time=repo.clock(), process=this_process(), manifest=gone.id,
        places=gone.txid,
    )  # fmt: skip
    store(repo).inject(look_on("size", lambda _: end(repo, gone), key=commit_key(gone.txid)))
    assert join(repo, began) is None
