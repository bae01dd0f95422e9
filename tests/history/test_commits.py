"""Commits: how a log is interpreted, competing changes, and damage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from casckpt.errors import CasckptError, Conflict, Revoked, StorageError
from casckpt.format.keys import commit_key
from casckpt.format.records import Purged, Restored
from casckpt.history.commits import LaterKind, append, commit, forget, keep, list_commits, list_names, purge, restore
from casckpt.history.following import newest_reusable
from casckpt.history.transactions import revoke
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore, Traits
from casckpt.storage.local.store import LocalStore
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.repositories import Ticks, commit_bare, committed, meanwhile, memory, repository


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return repository(tmp_path)


def states(repo: Repository) -> dict[str, str]:
    return {txid: commit.last for txid, commit in list_commits(repo).commits.items()}


def test_a_commit_is_listed_as_it_was_written(repo: Repository) -> None:
    record = committed(repo, "sft/a", 12, metadata={"loss": 1.5, "n": [1, None, "x"]}, tensors=3, seconds=0.25)
    commit(repo, record)
    found = list_commits(repo).commits[record.txid]
    assert found.committed == record
    assert (found.id, found.run, found.step) == (record.manifest, "sft/a", 12)
    assert (found.last, found.number, found.changed_at) == ("committed", 0, record.time)
    assert found.live
    assert found.visible
    assert str(found) == f"sft/a@12 ({record.manifest[:12]})"


def test_a_commit_can_be_forgotten_restored_and_purged(repo: Repository) -> None:
    first = commit_bare(repo)
    forgotten = forget(repo, first)
    assert (forgotten.live, forgotten.visible, forgotten.number) == (True, False, 1)
    restored = restore(repo, forgotten)
    assert (restored.live, restored.visible, restored.number) == (True, True, 2)
    purged = purge(repo, forget(repo, restored))
    assert (purged.live, purged.visible, purged.number) == (False, False, 4)
    assert list_commits(repo).commits[first.txid] == purged
    assert list_commits(repo).live() == []


def test_changing_a_commit_to_its_current_state_returns_it_unchanged(repo: Repository) -> None:
    first = commit_bare(repo)
    assert restore(repo, first) == first
    forgotten = forget(repo, first)
    assert forget(repo, forgotten) == forgotten
    purged = purge(repo, forgotten)
    assert purge(repo, purged) == purged
    assert len(list(repo.storage.list("commits/"))) == 3


def test_a_purged_commit_remains_purged(repo: Repository) -> None:
    purged = purge(repo, forget(repo, commit_bare(repo)))
    for change in (forget, restore):
        with pytest.raises(Conflict, match="gone for good"):
            change(repo, purged)


def test_only_forgotten_commits_can_be_purged(repo: Repository) -> None:
    with pytest.raises(Conflict, match="forget it first"):
        purge(repo, commit_bare(repo))


def test_an_old_handle_of_a_restored_commit_can_forget_it(repo: Repository) -> None:
    old = forget(repo, commit_bare(repo))
    restore(repo, old)
    assert forget(repo, old).number == 3
    assert states(repo) == {old.txid: "forgotten"}


def test_an_old_listing_never_overrides_a_later_change(repo: Repository) -> None:
    old = commit_bare(repo)
    restore(repo, forget(repo, old))
    with pytest.raises(Conflict, match="another process has just restored it"):
        forget(repo, old)


def test_a_purge_based_on_an_old_listing_fails_regardless_of_the_clocks(tmp_path: Path) -> None:
    """The commit was restored, tagged and forgotten again within one clock tick.

    Therefore, its `forgotten` record is not the one that gc read.
    """
    repo = repository(tmp_path, clock=Ticks(step=0))
    old = forget(repo, commit_bare(repo))
    now = forget(repo, restore(repo, old))
    assert now.changed_at == old.changed_at
    with pytest.raises(Conflict, match="another process has just"):
        purge(repo, old)
    assert keep(repo, now.txid, 4)
    assert purge(repo, now).number == 5


def test_a_change_returns_an_old_handle_that_is_already_in_the_requested_state(repo: Repository) -> None:
    old = commit_bare(repo)
    now = forget(repo, old)
    assert forget(repo, old) == now


def test_a_visible_twin_prevents_a_restore(repo: Repository) -> None:
    one = forget(repo, commit_bare(repo, "a", 1))
    two = commit_bare(repo, "a", 1)
    with pytest.raises(Conflict, match="visible under the same run and step") as caught:
        restore(repo, one)
    assert caught.value.checkpoints == (one.id, two.id)
    forget(repo, two)
    assert restore(repo, one).visible


def test_a_step_resolves_to_the_later_of_two_twins(repo: Repository) -> None:
    twins = [commit_bare(repo, "a", 1) for _ in range(3)]
    other = commit_bare(repo, "a", 2)
    found = list_commits(repo)
    assert [c.txid for c in found.current()] == [twins[2].txid, other.txid]
    assert [c.txid for c in found.superseded()] == [twins[0].txid, twins[1].txid]
    forget(repo, twins[2])
    assert [c.txid for c in list_commits(repo).superseded()] == [twins[0].txid]


def test_the_newest_live_commit_of_a_run_may_be_forgotten_but_not_purged(repo: Repository) -> None:
    one, two, three = (commit_bare(repo, "a", step) for step in (3, 2, 1))
    commit_bare(repo, "b", 9)
    forget(repo, two)
    purge(repo, forget(repo, three))
    newest = newest_reusable(repo, "a", anew=True)
    assert newest is not None
    assert newest.txid == two.txid
    assert newest_reusable(repo, "c", anew=True) is None
    assert list_commits(repo).runs() == ["a", "b"]
    assert [c.txid for c in list_commits(repo).live()][:2] == [one.txid, two.txid]


def test_a_commit_of_a_revoked_transaction_is_rejected(repo: Repository) -> None:
    record = committed(repo, "a", 4)
    assert revoke(repo, record.txid, "no sign of life")
    with pytest.raises(Revoked, match=r"save of a@4 was revoked.*no sign of life.*save again"):
        commit(repo, record)
    found = list_commits(repo)
    assert (found.live(), found.visible()) == ([], [])
    assert found.commits[record.txid].last == "revoked"
    with pytest.raises(Revoked):
        _ = found.commits[record.txid].run
    with pytest.raises(Conflict, match="revoked"):
        forget(repo, found.commits[record.txid])


def test_a_commit_cannot_be_revoked(repo: Repository) -> None:
    first = commit_bare(repo)
    assert not revoke(repo, first.txid, "late")
    assert states(repo) == {first.txid: "committed"}


def test_committing_twice_creates_one_commit(repo: Repository) -> None:
    record = committed(repo)
    commit(repo, record)
    commit(repo, record)
    with pytest.raises(Conflict):
        commit(repo, committed(repo, txid=record.txid))


def test_a_commit_whose_response_was_lost_succeeds(tmp_path: Path) -> None:
    repo = repository(tmp_path, FaultyStore(memory(), [fail_after("put", key="commits/*")]))
    assert states(repo) == {}
    first = commit_bare(repo)
    assert states(repo) == {first.txid: "committed"}


def test_a_failed_commit_leaves_nothing_behind(tmp_path: Path) -> None:
    repo = repository(tmp_path, FaultyStore(memory(), [fail_before("put", key="commits/*")]))
    with pytest.raises(StorageError):
        commit_bare(repo)
    assert states(repo) == {}
    assert list_names(repo) == set()


def test_a_commit_fails_if_its_transaction_is_revoked_first(tmp_path: Path) -> None:
    storage = memory()
    gc = repository(tmp_path, storage)
    repo = repository(tmp_path, FaultyStore(storage), seed=2)
    record = committed(repo)
    repo.storage.inject(call_first("put", meanwhile(lambda: revoke(gc, record.txid, "slow"))))  # type: ignore[attr-defined]  # a FaultyStore
    with pytest.raises(Revoked):
        commit(repo, record)


def test_a_commit_fails_if_gc_has_deleted_the_log_of_its_revoked_transaction(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path, FaultyStore(storage))
    record = committed(repo)
    assert revoke(repo, record.txid, "slow")
    delete = meanwhile(lambda: storage.delete(commit_key(record.txid)))
    repo.storage.inject(call_first("get", delete, key=commit_key(record.txid)))  # type: ignore[attr-defined]  # a FaultyStore
    with pytest.raises(Revoked, match="gc has deleted its log"):
        commit(repo, record)


def at_once(storage: ObjectStore, tmp_path: Path, actions: Sequence[Callable[[Repository], object]]) -> list[object]:
    """Return the result or error of each action. The first put of a record in each waits for the puts of all others."""
    barrier = threading.Barrier(len(actions), timeout=60)
    results: list[object] = [None] * len(actions)

    def run(index: int) -> None:
        wait = call_first("put", meanwhile(barrier.wait), key="commits/*")
        repo = repository(tmp_path, FaultyStore(storage, [wait]), seed=index, clock=Ticks(now=index))
        try:
            results[index] = actions[index](repo)
        except CasckptError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_exactly_one_of_eight_simultaneous_appends_succeeds(tmp_path: Path, where: str) -> None:
    storage: ObjectStore = memory() if where == "memory" else LocalStore(tmp_path / "store")
    repo = repository(tmp_path, storage)
    forgotten = forget(repo, commit_bare(repo))
    kinds: list[LaterKind] = [Restored, Purged] * 4
    results = at_once(storage, tmp_path, [partial(append, commit=forgotten, kind=kind) for kind in kinds])
    now = list_commits(repo).commits[forgotten.txid]
    assert now.number == 2
    for kind, result in zip(kinds, results, strict=True):
        if kind.__name__.lower() == now.last:
            assert result == now  # the winner, and the processes that wanted the same record
        else:
            assert isinstance(result, Conflict)


def test_exactly_one_of_eight_simultaneous_commits_succeeds(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path, storage)
    mine = [committed(repo) for _ in range(8)]
    same = [committed(repo, txid=mine[0].txid, manifest=record.manifest) for record in mine]
    results = at_once(storage, tmp_path, [partial(commit, record=record) for record in same])
    winners = [record for record, result in zip(same, results, strict=True) if result is None]
    assert [c.committed for c in list_commits(repo).live()] == winners
    assert all(isinstance(result, Conflict) for result in results if result is not None)
    assert len(winners) == 1


def test_files_with_other_names_are_ignored(repo: Repository) -> None:
    first = commit_bare(repo)
    for key in ("commits/README", f"commits/{first.txid}.01", f"commits/{first.txid}.x", "commits/x.1", "commits/a/b"):
        repo.storage.put(key, b"hello")
    found = list_commits(repo)
    assert found.commits.keys() == {first.txid}
    assert found.damaged == {}
    assert list_names(repo) == {(first.txid, 0)}


def test_log_numbers_are_compared_numerically(repo: Repository) -> None:
    now = commit_bare(repo)
    for _ in range(6):
        now = restore(repo, forget(repo, now))
    assert now.number == 12
    assert list_commits(repo).commits[now.txid] == now


def test_failing_storage_raises_an_error_instead_of_an_empty_listing(tmp_path: Path) -> None:
    repo = repository(tmp_path, FaultyStore(memory()))
    commit_bare(repo)
    repo.storage.inject(fail_before("get", key="commits/*"))  # type: ignore[attr-defined]  # a FaultyStore
    with pytest.raises(StorageError):
        list_commits(repo)


def test_each_host_reads_a_record_only_once(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    writer = repository(tmp_path, storage)
    made = [commit_bare(writer, "a", step) for step in range(20)]
    forget(writer, made[3])
    list_commits(writer)
    reads = storage.count("get", "commits/*")
    assert reads == 21
    again = repository(tmp_path, storage)
    assert len(list_commits(again).visible()) == 19
    assert storage.count("get", "commits/*") == reads
    forget(again, made[5])
    assert len(list_commits(again).visible()) == 18
    assert storage.count("get", "commits/*") == reads + 1


def test_a_cached_record_that_is_no_longer_listed_is_ignored(repo: Repository) -> None:
    kept, gone = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    list_commits(repo)
    repo.storage.delete(commit_key(gone.txid))
    assert list_commits(repo).commits.keys() == {kept.txid}


def test_a_restored_backup_with_different_records_is_reread(repo: Repository) -> None:
    purged = purge(repo, forget(repo, commit_bare(repo)))
    assert not list_commits(repo).commits[purged.txid].live
    # as with a backup from before the purge that is restored on a different host
    repo.storage.delete(commit_key(purged.txid, 2))
    repo.put_record(commit_key(purged.txid, 2), Restored(txid=purged.txid, time=purged.changed_at, who="ann@node3"))
    assert list_commits(repo).commits[purged.txid].visible


def test_remote_storage_is_read_by_several_threads(tmp_path: Path) -> None:
    class Remote(MemoryStore):
        traits = Traits(remote=True, read_gap=0, parallel=4, exclusive=True)

    storage = MemoryStore(uuid4().hex)
    writer = repository(tmp_path, storage)
    made = {commit_bare(writer, "a", step).txid for step in range(8)}
    barrier = threading.Barrier(4, timeout=60)  # passes only if four reads are in flight at the same time
    waits = [call_first("get", meanwhile(barrier.wait), key="commits/*", times=8)]
    repo = repository(tmp_path, FaultyStore(Remote(storage.name), waits))
    assert list_commits(repo).commits.keys() == made
