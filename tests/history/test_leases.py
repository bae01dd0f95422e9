"""Expiring tags are granted only if their checkpoint is visible afterward. They are renewed in time, and end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from casckpt.errors import Conflict, InvalidInput, NotFound, StorageError
from casckpt.history.commits import Commit, forget, list_commits, purge, restore
from casckpt.history.leases import Lease, hold, renew
from casckpt.history.tags import (
    FOREIGN_CLOCKS,
    delete_tag,
    get_tag,
    list_tags,
    remove_old_generations,
    set_tag,
    tags,
)
from casckpt.repository.repository import Repository
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.gcs import ticking
from tests.support.repositories import commit_bare, meanwhile

HOUR = 3600.0


def advance(repo: Repository, seconds: float) -> None:
    ticking(repo)(seconds)


def generations(repo: Repository, name: str) -> int:
    return len(list(repo.storage.list(f"tags/{name}/")))


def test_a_tag_with_a_duration_expires(repo: Repository) -> None:
    commit = commit_bare(repo)
    tag, held = hold(repo, "eval", commit, HOUR)
    assert held == commit
    assert tag.expires is not None
    assert abs(tag.expires - repo.clock() - HOUR * 1e6) < 1e6
    assert get_tag(repo, "eval") == tag
    assert tag.holder.rpartition(":")[2].isdecimal()
    advance(repo, HOUR + 1)
    assert (get_tag(repo, "eval"), tags(repo)) == (None, {})
    assert list_tags(repo, slack=FOREIGN_CLOCKS).tags == {"eval": tag}, "for a gc it counts an hour longer"
    advance(repo, HOUR)
    assert list_tags(repo, slack=FOREIGN_CLOCKS).tags == {}


def test_an_expired_tag_can_be_set_moved_and_deleted(repo: Repository) -> None:
    one, two = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    hold(repo, "eval", one, HOUR)
    advance(repo, 3 * HOUR)
    assert hold(repo, "eval", two, HOUR)[0].generation == 1
    assert set_tag(repo, "eval", one).expires is None
    advance(repo, 100 * HOUR)
    assert tags(repo)["eval"].txid == one.txid
    delete_tag(repo, "eval")
    assert tags(repo) == {}


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_tag_without_a_duration_is_rejected(repo: Repository, seconds: float) -> None:
    with pytest.raises(InvalidInput, match="cannot expire immediately"):
        hold(repo, "eval", commit_bare(repo), seconds)
    with pytest.raises(InvalidInput, match="not a valid name"):
        hold(repo, "Eval", commit_bare(repo), HOUR)


# grants


def forgets(repo: Repository, commit: Commit) -> Callable[[], object]:
    return lambda: forget(repo, commit)


def purges(repo: Repository, commit: Commit) -> Callable[[], object]:
    return lambda: purge(repo, forget(repo, commit))


@pytest.mark.parametrize("ends", [forgets, purges])
@pytest.mark.parametrize("had_one", [False, True])
def test_a_tag_is_not_granted_if_its_checkpoint_disappears_in_the_meantime(
    repo: Repository, faults: FaultyStore, ends: Callable[..., Callable[[], object]], had_one: bool
) -> None:
    """The log is read after the put. Before the put, the checkpoint may still have been visible."""
    commit, other = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    if had_one:
        set_tag(repo, "eval", other)
    faults.inject(call_first("put", meanwhile(ends(repo, commit)), key="tags/*"))
    with pytest.raises(NotFound, match=r"a@1 .* was (forgotten|purged), and only a visible checkpoint can be leased"):
        hold(repo, "eval", commit, HOUR)
    assert {name: tag.txid for name, tag in tags(repo).items()} == ({"eval": other.txid} if had_one else {})


def test_an_expiring_tag_is_not_granted_for_a_forgotten_checkpoint(repo: Repository) -> None:
    commit = forget(repo, commit_bare(repo))
    with pytest.raises(NotFound, match="casckpt restore"):
        hold(repo, "eval", commit, HOUR)
    assert not list_commits(repo).commits[commit.txid].visible
    assert hold(repo, "eval", restore(repo, commit), HOUR)[1].visible


def test_an_expiring_tag_is_granted_if_its_checkpoint_is_restored_in_time(
    repo: Repository, faults: FaultyStore
) -> None:
    commit = commit_bare(repo)
    faults.inject(call_first("put", meanwhile(lambda: restore(repo, forget(repo, commit))), key="tags/*"))
    assert hold(repo, "eval", commit, HOUR)[1].visible


def test_a_tag_is_granted_if_a_different_commit_of_the_id_is_visible(repo: Repository) -> None:
    old = commit_bare(repo, "a", 1)
    again = commit_bare(repo, "a", 1, manifest=old.id)
    assert hold(repo, "eval", purge(repo, forget(repo, old)), HOUR)[1] == again


def test_a_lease_that_is_not_granted_does_not_undo_a_later_move_of_its_tag(
    repo: Repository, faults: FaultyStore
) -> None:
    commit, other = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    faults.inject(call_first("put", meanwhile(lambda: forget(repo, commit)), key="tags/*"))
    faults.inject(call_first("put", meanwhile(lambda: set_tag(repo, "eval", other)), key="tags/*/1"))
    with pytest.raises(NotFound):
        hold(repo, "eval", commit, HOUR)
    assert tags(repo)["eval"].txid == other.txid


# renewals


def test_a_timely_renewal_does_not_read_the_log(repo: Repository) -> None:
    tag, commit = hold(repo, "eval", commit_bare(repo), HOUR)
    forget(repo, commit)  # this does not end a lease
    advance(repo, HOUR / 2)
    made, _ = renew(repo, tag, commit, HOUR)
    assert (made.generation, made.unique) == (1, tag.unique)
    assert made.expires is not None
    assert tag.expires is not None
    assert made.expires - tag.expires > HOUR * 4e5
    assert get_tag(repo, "eval") == made


@pytest.mark.parametrize("visible", [False, True])
def test_a_late_renewal_succeeds_only_if_its_checkpoint_is_still_visible(
    repo: Repository, faults: FaultyStore, visible: bool
) -> None:
    """The clock is read after the renewal is stored, because the network may have delayed the put."""
    tag, commit = hold(repo, "eval", commit_bare(repo), HOUR)
    if not visible:
        forget(repo, commit)
    faults.inject(call_first("put", meanwhile(lambda: advance(repo, HOUR)), key="tags/eval/1"))
    if visible:
        assert renew(repo, tag, commit, HOUR)[0].generation == 1
        return
    with pytest.raises(NotFound, match="forgotten"):
        renew(repo, tag, commit, HOUR)
    assert tags(repo) == {}


@pytest.mark.parametrize("ended", [False, True])
def test_a_lease_that_a_different_process_ended_or_moved_is_not_renewed(repo: Repository, ended: bool) -> None:
    tag, commit = hold(repo, "eval", commit_bare(repo, "a", 1), HOUR)
    if ended:
        delete_tag(repo, "eval")
    else:
        set_tag(repo, "eval", commit_bare(repo, "a", 2))
    with pytest.raises(Conflict, match="another process ended or moved"):
        renew(repo, tag, commit, HOUR)
    assert generations(repo, "eval") == 2


def test_a_renewal_whose_response_was_lost_does_not_prevent_the_next_one(repo: Repository, faults: FaultyStore) -> None:
    tag, commit = hold(repo, "eval", commit_bare(repo), HOUR)
    faults.inject(fail_after("put", key="tags/eval/1"), fail_before("get", key="tags/eval/1", times=2))
    with pytest.raises(StorageError):
        renew(repo, tag, commit, HOUR)
    faults.heal()
    assert renew(repo, tag, commit, HOUR)[0].generation == 2


# leases


def test_a_lease_has_a_unique_name_and_ends_when_its_block_ends(repo: Repository) -> None:
    commit = commit_bare(repo)
    with Lease(repo, commit, HOUR) as one, Lease(repo, commit, HOUR) as other:
        assert one.commit == other.commit == commit
        assert len(tags(repo)) == 2
        assert all(name.startswith("lease-") and tag.txid == commit.txid for name, tag in tags(repo).items())
    assert tags(repo) == {}
    with pytest.raises(ZeroDivisionError), Lease(repo, commit, HOUR):
        raise ZeroDivisionError
    assert tags(repo) == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("casckpt-lease")]


def names(repo: Repository) -> set[str]:
    return {entry.key.split("/")[1] for entry in repo.storage.list("tags/")}


def test_successive_leases_leave_a_single_record_behind(repo: Repository) -> None:
    commits = [commit_bare(repo, "a", step) for step in (1, 2)]
    for _ in range(5):
        for commit in commits:
            with Lease(repo, commit, HOUR) as lease:
                lease.renew()
                assert [tag.txid for tag in tags(repo).values()] == [commit.txid]
            assert tags(repo) == {}
    with Lease(repo, commits[0], HOUR), Lease(repo, commits[1], HOUR):
        assert {tag.txid for tag in tags(repo).values()} == {commit.txid for commit in commits}
    assert len(names(repo)) == 2
    remove_old_generations(repo)
    assert len(list(repo.storage.list("tags/"))) == 2


def test_a_lease_name_ended_by_a_different_process_is_not_reused(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_bare(repo)
    with Lease(repo, commit, HOUR):
        pass
    monkeypatch.setattr("casckpt.storage.forking.os.getpid", lambda: -1)
    with Lease(repo, commit, HOUR):
        pass
    assert len(names(repo)) == 2


def test_the_name_of_a_lease_that_did_not_end_is_not_reused(repo: Repository, faults: FaultyStore) -> None:
    commit = commit_bare(repo)
    faults.inject(fail_before("put", key="tags/*/1"))
    with Lease(repo, commit, HOUR):
        pass
    with Lease(repo, commit, HOUR) as lease:
        assert len(tags(repo)) == 2
        delete_tag(repo, max(tags(repo), key=lambda name: tags(repo)[name].expires or 0))
        assert not lease.renew()
    with Lease(repo, commit, HOUR):
        assert len(names(repo)) == 3


@pytest.mark.parametrize("ended", [False, True])
def test_a_lease_name_that_a_different_process_used_later_is_not_reused(repo: Repository, ended: bool) -> None:
    first, second = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    with Lease(repo, first, HOUR):
        (name,) = tags(repo)
    set_tag(repo, name, first)
    if ended:
        delete_tag(repo, name)
    with Lease(repo, second, HOUR):
        assert len(names(repo)) == 2
    assert list(tags(repo)) == ([] if ended else [name])


def test_a_lease_name_with_too_many_generations_is_not_used_again(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casckpt.history.leases._GENERATIONS", 6)
    commit = commit_bare(repo)
    for count in range(1, 10):
        with Lease(repo, commit, HOUR):
            pass
        assert len(names(repo)) == -(-count // 4)
        assert max(generations(repo, name) for name in names(repo)) <= 8


def test_an_ended_lease_does_not_renew_a_reused_name(repo: Repository) -> None:
    first, second = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    with Lease(repo, first, HOUR) as before:
        pass
    with Lease(repo, second, HOUR):
        assert len(names(repo)) == 1
        assert not before.renew(), "its own is over"
        assert [tag.txid for tag in tags(repo).values()] == [second.txid]


def test_a_lease_on_a_purged_checkpoint_is_rejected(repo: Repository) -> None:
    with pytest.raises(NotFound):
        Lease(repo, forget(repo, commit_bare(repo)), HOUR)
    assert names(repo) == set()


def test_a_lease_is_renewed_in_the_background(repo: Repository, faults: FaultyStore) -> None:
    renewed = threading.Event()
    faults.inject(call_first("put", meanwhile(renewed.set), key="tags/lease-*/3"))
    with Lease(repo, commit_bare(repo), 0.05):
        assert renewed.wait(60)


def test_a_failed_renewal_is_logged_and_retried(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with Lease(repo, commit_bare(repo, "a", 1), HOUR) as lease:
        faults.inject(fail_before("put", key="tags/*"))
        with caplog.at_level(logging.WARNING):
            assert not lease.renew()
        assert "a@1" in caplog.text
        assert "casckpt could not renew" in caplog.text
        assert lease.renew()
    assert tags(repo) == {}


def test_a_lost_lease_is_logged(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    with Lease(repo, commit_bare(repo, "a", 1), HOUR) as lease:
        (name,) = tags(repo)
        delete_tag(repo, name)
        with caplog.at_level(logging.ERROR):
            assert not lease.renew()
    assert "was lost, so the checkpoint may be purged" in caplog.text
    assert generations(repo, name) == 2, "it is not ended once more"


def test_failing_to_end_a_lease_does_not_hide_an_error(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    commit = commit_bare(repo)
    faults.inject(fail_before("put", key="tags/*/1"))
    with pytest.raises(ZeroDivisionError), Lease(repo, commit, HOUR):
        raise ZeroDivisionError
    assert "it expires at" in caplog.text


def test_a_forked_child_neither_renews_nor_ends_a_lease(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease(repo, commit_bare(repo), HOUR)
    with lease:
        monkeypatch.setattr("casckpt.history.leases.os.getpid", lambda: -1)
        lease.__exit__(None, None, None)
        monkeypatch.undo()
        assert len(tags(repo)) == 1
    assert tags(repo) == {}
