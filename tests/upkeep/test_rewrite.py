"""Rewrites: a single record hides the old commit and shows the new one, and one of several competing processes
wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casckpt.base.names import run_hash
from casckpt.contents.refs import resolve
from casckpt.errors import Conflict, Damaged, StorageError
from casckpt.format.keys import commit_key, parse_log
from casckpt.format.names import TxId
from casckpt.format.records import Committed, Replaced, changed
from casckpt.history.commits import (
    Commit,
    CommitList,
    follow,
    forget,
    keep,
    list_commits,
    purge,
    purge_unreadable,
    read_log,
    refresh,
    restore,
)
from casckpt.history.folding import STANDS, UNSETTLED, VOID
from casckpt.history.following import is_visible, newest
from casckpt.history.leases import hold
from casckpt.history.tags import named_by, set_tag, tags
from casckpt.repository.repository import Repository
from casckpt.storage.base import Known, ListedObject
from casckpt.upkeep.gc.recovery import settle
from casckpt.upkeep.rewrite import rewrite
from tests.support.announced import announcements
from tests.support.faulty import Call, FaultyStore, call_first, fail_after, fail_before, look_on
from tests.support.repositories import (
    Ticks,
    commit_bare,
    half_rewrite,
    meanwhile,
    memory,
    repository,
    rewrite_bare,
)


def now(repo: Repository, commit: Commit) -> Commit:
    """Read the log, and check that a new process sees the same state."""
    found = list_commits(repo).commits[commit.txid]
    assert read_log(repo, commit.txid) == found
    assert refresh(repo, commit) == found
    return found


def visible(repo: Repository) -> list[TxId]:
    return [one.txid for one in list_commits(repo).visible()]


def finish(repo: Repository, made: Commit) -> None:
    """Write the delayed record of that rewriter."""
    assert made.replaces is not None
    base, number = made.replaces
    repo.put_record(commit_key(base, number), Replaced(txid=base, time=repo.clock(), by=made.txid))


def test_a_rewrite_replaces_its_base(repo: Repository) -> None:
    base = commit_bare(repo, "a", 1)
    later = commit_bare(repo, "a", 2)
    made = rewrite_bare(repo, base)
    assert (made.id, made.origin, made.replaces) == (base.id, base.txid, (base.txid, 1))
    assert (now(repo, base).last, now(repo, base).replaced) == ("replaced", (1, made.txid))
    assert now(repo, made) == made
    assert visible(repo) == [made.txid, later.txid]
    assert [one.txid for one in list_commits(repo).current()] == [made.txid, later.txid]
    assert list_commits(repo).superseded() == []
    for ref in (base.id, "a@1", base):
        assert resolve(repo, ref) == made
    assert resolve(repo, "a@latest") == resolve(repo, "latest") == later
    again = rewrite_bare(repo, made)
    assert (again.origin, visible(repo)) == (base.txid, [again.txid, later.txid])
    assert follow(repo, refresh(repo, base)) == now(repo, again)


def test_a_rewrite_remains_valid_after_its_base_is_purged(repo: Repository) -> None:
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    purged = purge(repo, refresh(repo, base))
    assert (purged.live, now(repo, made).standing, visible(repo)) == (False, STANDS, [made.txid])
    with pytest.raises(Conflict, match="gone for good"):
        restore(repo, purged)
    forgotten = forget(repo, made)
    assert not now(repo, forgotten).visible
    assert restore(repo, forgotten).visible
    assert visible(repo) == [made.txid]


def test_forgetting_a_rewrite_forgets_the_checkpoint(repo: Repository) -> None:
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    forgotten = forget(repo, made)
    assert visible(repo) == []
    assert resolve(repo, base.id) == now(repo, forgotten)
    assert restore(repo, resolve(repo, base.id)).txid == made.txid


def test_a_rewrite_cannot_be_undone_if_a_different_checkpoint_has_the_step(repo: Repository) -> None:
    base = commit_bare(repo, "a", 1)
    forget(repo, rewrite_bare(repo, base))
    other = commit_bare(repo, "a", 1)
    with pytest.raises(Conflict, match="visible under the same run and step"):
        restore(repo, refresh(repo, base))
    assert visible(repo) == [other.txid]


def test_gc_ends_the_rewrite_of_a_dead_process_but_not_of_a_slow_one(repo: Repository) -> None:
    clock = repo.clock
    assert isinstance(clock, Ticks)
    base = commit_bare(repo)
    made = half_rewrite(repo, base)
    settle(repo, 3600.0, [])
    assert now(repo, made).standing == UNSETTLED
    clock.advance(3600)
    settle(repo, 3600.0, [])
    assert (now(repo, made).standing, now(repo, made).last) == (VOID, "forgotten")
    assert (now(repo, base).number, visible(repo)) == (1, [base.txid])
    with pytest.raises(Conflict):
        finish(repo, made)
    assert not purge(repo, now(repo, made)).live
    assert rewrite_bare(repo, now(repo, base)).visible


def test_gc_ends_an_unannounced_rewrite(repo: Repository) -> None:
    base = commit_bare(repo)
    made = half_rewrite(repo, base)
    for entry in list(repo.storage.list("runs/")):
        repo.storage.delete(entry.key)
    settle(repo, 0, [])
    assert now(repo, made).standing == VOID


def in_between(faults: FaultyStore, base: Commit, act: Callable[[], object]) -> None:
    """Let a different process act right before the record that makes a rewrite visible."""
    faults.inject(call_first("put", meanwhile(act), key=f"{commit_key(base.txid)}.1"))


def other(tmp_path: Path, repo: Repository, seed: int = 7) -> Repository:
    """Open the store in a process on a different host."""
    storage = repo.storage
    assert isinstance(storage, FaultyStore)
    return repository(tmp_path / f"other {seed}", storage.inner, seed=seed, clock=repo.clock)


def test_a_forget_during_a_rewrite_takes_precedence(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)
    in_between(faults, base, lambda: forget(other(tmp_path, repo), base))
    with pytest.raises(Conflict, match="not rewritten"):
        rewrite_bare(repo, base)
    assert visible(repo) == []
    (made,) = (one for one in list_commits(repo).live() if one.txid != base.txid)
    assert (made.standing, made.last) == (VOID, "forgotten")
    assert restore(repo, now(repo, base)).visible
    assert visible(repo) == [base.txid]


def test_exactly_one_of_two_rewriters_succeeds(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)
    won = []
    in_between(faults, base, lambda: won.append(rewrite_bare(other(tmp_path, repo), base)))
    with pytest.raises(Conflict, match="not rewritten"):
        rewrite_bare(repo, base)
    assert visible(repo) == [won[0].txid]
    assert sorted(one.standing for one in list_commits(repo).live()) == [STANDS, STANDS, VOID]


def test_an_invisible_checkpoint_cannot_be_rewritten(repo: Repository) -> None:
    base = commit_bare(repo)
    made = half_rewrite(repo, base)
    for one in (forget(repo, base), now(repo, made)):
        with pytest.raises(Conflict, match="forgotten, purged or rewritten in the meantime"):
            rewrite_bare(repo, one)
    assert list(repo.storage.list("transactions/")) == []


def test_a_rewrite_that_writes_nothing_leaves_nothing_behind(repo: Repository) -> None:
    base = commit_bare(repo)
    assert rewrite(repo, base, lambda txid, listed: None) is None
    assert (visible(repo), len(list_commits(repo).live())) == ([base.txid], 1)


def test_a_rewriter_whose_response_was_lost_finds_that_it_succeeded(repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)
    faults.inject(
        fail_after("put", key=f"{commit_key(base.txid)}.1"), fail_before("get", key=f"{commit_key(base.txid)}.1")
    )
    assert rewrite_bare(repo, base).visible
    assert now(repo, base).number == 1


def test_a_rewriter_that_gets_no_response_occupies_the_log_number_before_it_fails(
    repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)
    faults.inject(fail_before("put", key=f"{commit_key(base.txid)}.1"))
    with pytest.raises(StorageError):
        rewrite_bare(repo, base)
    (made,) = (one for one in list_commits(repo).live() if one.txid != base.txid)
    assert (made.standing, made.last, visible(repo)) == (VOID, "forgotten", [base.txid])
    with pytest.raises(Conflict):  # the first write, which arrives late
        finish(repo, made)


def test_a_rewriter_that_cannot_occupy_the_log_number_forgets_nothing(repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)
    faults.inject(fail_before("put", key=f"{commit_key(base.txid)}.1", times=2))
    with pytest.raises(StorageError):
        rewrite_bare(repo, base)
    (made,) = (one for one in list_commits(repo).live() if one.txid != base.txid)
    assert (made.standing, made.last) == (UNSETTLED, "committed")
    finish(repo, made)
    assert visible(repo) == [made.txid]


def test_a_rewrite_and_the_record_that_shows_it_are_announced_before_they_exist(
    repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)
    seen = []

    def look(call: Call) -> None:
        seen.append(parse_log(call.key))
        assert seen[-1] in {one for _, some in announcements(repo) for one in some}

    faults.inject(look_on("put", look, key="commits/*", times=9))
    made = rewrite_bare(repo, base)
    assert seen == [(made.txid, 0), (base.txid, 1)]


# non-atomic listings


class Torn(FaultyStore):
    """Storage whose next listing of commits/ lacks the matching keys."""

    hides: Callable[[str], bool] | None = None

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        hides = self.hides if prefix == "commits/" else None
        return (entry for entry in super().list(prefix, known=known) if hides is None or not hides(entry.key))


def test_a_rewrite_that_is_missing_from_a_listing_is_read_by_its_key(tmp_path: Path) -> None:
    storage = Torn(memory())
    repo = repository(tmp_path, storage)
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    upon = rewrite_bare(repo, made)
    storage.hides = lambda key: made.txid in key or upon.txid in key
    for host in (repo, repository(tmp_path / "new", storage, seed=5)):
        assert visible(host) == [upon.txid]
    storage.hides = lambda key: base.txid in key
    assert visible(repository(tmp_path / "newer", storage, seed=6)) == [upon.txid]
    storage.hides = None
    assert list_commits(repo) == list_commits(repository(tmp_path / "fresh", storage, seed=7))


def test_missing_lower_numbers_of_a_log_are_read_by_their_keys(tmp_path: Path) -> None:
    storage = Torn(memory())
    repo = repository(tmp_path, storage)
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    restore(repo, refresh(repo, base))
    last = forget(repo, refresh(repo, base))
    assert last.number == 3
    storage.hides = lambda key: key in (commit_key(base.txid, 1), commit_key(base.txid, 2))
    found = list_commits(repository(tmp_path / "new", storage, seed=5))
    assert found.damaged == {}
    assert (found.commits[base.txid], found.commits[made.txid].standing) == (last, VOID)


def test_a_checkpoint_that_was_always_visible_is_never_reported_as_gone(tmp_path: Path) -> None:
    """The listing shows that the rewrite was forgotten, but lacks the earlier restore of the base."""
    storage = Torn(memory())
    repo = repository(tmp_path, storage)
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    back = restore(repo, refresh(repo, base))
    settle(repo, 0, [])
    assert now(repo, made).last == "forgotten"
    storage.hides = lambda key: key == commit_key(base.txid, back.number)
    host = repository(tmp_path / "new", storage, seed=5)
    assert visible(host) == [base.txid]
    again = rewrite_bare(repo, back)
    storage.hides = lambda key: again.txid in key or key in (commit_key(base.txid, n) for n in (2, 3))
    assert visible(repository(tmp_path / "newer", storage, seed=6)) == [again.txid]


def test_reading_a_run_follows_checkpoints_that_are_replaced_meanwhile(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    """The reader first reads the rewrite, which is not valid yet.

    Then it reads the base, which has been replaced by then.
    """
    commit_bare(repo, step=0)
    base = commit_bare(repo, step=1)
    made = half_rewrite(repo, base)
    host = repository(tmp_path / "new", faults, seed=5)
    read = 0

    def stand(call: Call) -> None:
        nonlocal read
        read += 1
        if read == 2:  # after it has read the logs of the rewrite and its base
            finish(other(tmp_path, repo), made)

    faults.inject(call_first("get", stand, key=commit_key(base.txid), times=9))
    found = newest(host, "run", is_visible)
    faults.heal()
    assert (read, found) == (3, now(repo, made))


def test_a_lost_record_after_a_rewrite_does_not_prevent_listings(tmp_path: Path) -> None:
    """If the log of the base is read by keys, it ends before the gap, and the rewrite seems valid.

    The listing shows that it is not.
    """
    storage = memory()
    repo = repository(tmp_path, storage)
    base = commit_bare(repo, "a", 1)
    made = rewrite_bare(repo, base)
    forget(repo, restore(repo, now(repo, base)))
    storage.delete(commit_key(base.txid, 2))
    listed = list_commits(repository(tmp_path / "fresh", storage, seed=2))
    assert {one.txid for one in listed.live()} == {base.txid, made.txid}
    assert (listed.visible(), list(listed.damaged)) == ([], [made.txid])


def test_a_rewrite_undone_while_a_run_is_read_is_not_lost(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    seen = refresh(repo, base)

    def undo() -> None:
        host = other(tmp_path, repo)
        restore(host, seen)
        settle(host, 0, [])

    faults.inject(call_first("get", meanwhile(undo), key=commit_key(made.txid)))
    assert follow(repo, seen) == now(repo, base)


# tags


def test_tags_and_leases_apply_to_the_current_commit_of_an_id(repo: Repository) -> None:
    base = commit_bare(repo)
    set_tag(repo, "best", base)
    tag, _ = hold(repo, "lease-1", base, 60)
    made = rewrite_bare(repo, base)
    listed = list_commits(repo)
    assert [named_by(one, listed) for one in tags(repo).values()] == [made, made]
    purge(repo, refresh(repo, base))
    assert resolve(repo, "tag:best") == made
    assert hold(repo, "other", base, 60)[1] == made
    assert tag.txid == base.txid


def test_a_tag_can_be_set_on_a_checkpoint_that_was_just_rewritten(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)

    def rewritten() -> None:
        host = other(tmp_path, repo)
        rewrite_bare(host, base)
        purge(host, refresh(host, base))

    faults.inject(call_first("put", meanwhile(rewritten), key="tags/*"))
    set_tag(repo, "best", base)
    assert resolve(repo, "tag:best").visible


def test_a_tag_restores_the_current_commit_of_its_id(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    base = commit_bare(repo)

    def gone() -> None:
        host = other(tmp_path, repo)
        forget(host, rewrite_bare(host, base))

    faults.inject(call_first("put", meanwhile(gone), key="tags/*"))
    set_tag(repo, "best", base)
    assert resolve(repo, "tag:best").visible
    assert len(list_commits(repo).visible()) == 1


# damage and hostile records


def tear(repo: Repository, key: str) -> None:
    if repo.storage.size(key) is not None:
        repo.storage.delete(key)
    repo.storage.put(key, b"torn")


def test_a_rewrite_whose_status_cannot_be_read_is_reported_as_damaged(tmp_path: Path, repo: Repository) -> None:
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    purge(repo, refresh(repo, base))
    tear(repo, commit_key(base.txid, 1))
    for host in (repo, repository(tmp_path / "new", repo.storage, seed=5)):
        found = list_commits(host)
        assert set(found.damaged) == {made.txid}
        assert [one.txid for one in found.visible()] == [made.txid]  # no other commit of this ID is live
        with pytest.raises(Damaged, match="may say"):
            read_log(host, made.txid)


def test_a_rewrite_of_a_purged_base_can_be_read(repo: Repository) -> None:
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    tear(repo, commit_key(base.txid))
    assert set(list_commits(repo).damaged) == {base.txid, made.txid}
    purge_unreadable(repo, base.txid)
    found = list_commits(repo)
    assert (set(found.damaged), [one.txid for one in found.visible()]) == ({made.txid}, [made.txid])


def test_a_save_callback_receives_a_listing_that_was_made_after_the_save_began(
    repo: Repository, faults: FaultyStore
) -> None:
    base = commit_bare(repo)
    began = len(faults.calls)

    def save(txid: TxId, listed: CommitList) -> Committed:
        assert listed.commits[base.txid].visible
        methods = [(call.method, call.key.partition("/")[0]) for call in faults.calls[began:]]
        assert methods.index(("put", "transactions")) < methods.index(("list", "commits"))
        return changed(base.committed, txid=txid)

    assert rewrite(repo, base, save) is not None
    assert keep(repo, base.txid, 2)
    assert run_hash("run") in base.txid
