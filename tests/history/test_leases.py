"""Expiring tags and leases are granted only if their checkpoint is visible afterward. Leases are renewed in time, and
end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, StorageError
from casckpt.format.keys import tag_folder
from casckpt.format.records import Dropped
from casckpt.history.commits import Commit, bring_back, forget, list_commits, purge, restore
from casckpt.history.leases import Lease, hold, renew, take
from casckpt.history.tags import (
    FOREIGN_CLOCKS,
    delete_tag,
    end_lease,
    get_tag,
    list_tags,
    remove_old_generations,
    set_tag,
    tags,
)
from casckpt.repository.repository import Repository
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.gcs import keys, ticking
from tests.support.repositories import commit_bare, meanwhile, rewrite_bare

HOUR = 3600.0


def advance(repo: Repository, seconds: float) -> None:
    ticking(repo)(seconds)


def generations(repo: Repository, name: str) -> int:
    return len(list(repo.storage.list(f"{tag_folder(name)}/")))


def test_a_tag_with_a_duration_expires(repo: Repository) -> None:
    commit = commit_bare(repo)
    tag, held = hold(repo, "eval", commit, HOUR)
    assert held.places == commit.places
    assert tag.expires is not None
    assert abs(tag.expires - repo.clock() - HOUR * 1e6) < 1e6
    assert get_tag(repo, "eval") == tag
    assert tag.holder.rpartition(":")[2].isdecimal()
    advance(repo, HOUR + 1)
    assert (get_tag(repo, "eval"), tags(repo)) == (None, {})
    assert list_tags(repo, slack=FOREIGN_CLOCKS).tags == {"eval": tag}, "for a gc it counts an hour longer"
    advance(repo, HOUR)
    assert list_tags(repo, slack=FOREIGN_CLOCKS).tags == {}


def test_a_rule_that_has_not_seen_a_tag_with_a_duration_does_not_forget_its_checkpoint(repo: Repository) -> None:
    commit = commit_bare(repo)
    _, now = hold(repo, "eval", commit, HOUR)
    assert now.tagged == (("eval", 0),)
    with pytest.raises(Conflict, match="has just changed"):
        forget(repo, commit)


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


def test_a_tag_cannot_have_a_name_such_as_leases_have(repo: Repository) -> None:
    commit = commit_bare(repo)
    for set_it in (lambda name: hold(repo, name, commit, HOUR), lambda name: set_tag(repo, name, commit)):
        with pytest.raises(InvalidInput, match="leases have such names"):
            set_it("lease-0123456789abcdef")
        set_it("lease-1")
    repo.storage.put("tags/lease-0123456789abcdef/0", repo.storage.get("tags/lease-1/0", limit=1 << 20))
    assert list(tags(repo)) == ["lease-1"]


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
    assert hold(repo, "eval", purge(repo, forget(repo, old)), HOUR)[1].txid == again.txid


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
    lease, commit = take(repo, commit_bare(repo), HOUR)
    forget(repo, commit)  # this does not end a lease
    advance(repo, HOUR / 2)
    made, _ = renew(repo, lease, commit, HOUR)
    assert (made.name, made.generation) == (lease.name, 1)
    assert made.expires is not None
    assert lease.expires is not None
    assert made.expires - lease.expires > HOUR * 4e5
    assert get_tag(repo, lease.name) == made


@pytest.mark.parametrize("visible", [False, True])
def test_a_late_renewal_takes_a_new_lease_if_its_checkpoint_is_still_visible(
    repo: Repository, faults: FaultyStore, visible: bool
) -> None:
    """The clock is read after the renewal is stored, because the network may have delayed the put."""
    lease, commit = take(repo, commit_bare(repo), HOUR)
    if not visible:
        forget(repo, commit)
    faults.inject(call_first("put", meanwhile(lambda: advance(repo, HOUR)), key="leases/*/1"))
    if visible:
        made, _ = renew(repo, lease, commit, HOUR)
        assert made.name != lease.name, "a gc may be about to delete the generations of the old one"
        assert list(tags(repo)) == [made.name]
        return
    with pytest.raises(NotFound, match="forgotten"):
        renew(repo, lease, commit, HOUR)
    assert keys(repo, "leases/") == set()


def test_a_lease_that_a_different_process_ended_is_not_renewed_even_after_a_gc(repo: Repository) -> None:
    lease, commit = take(repo, commit_bare(repo), HOUR)
    delete_tag(repo, lease.name)
    assert tags(repo) == {}
    with pytest.raises(NotFound, match="there is no tag"):
        delete_tag(repo, lease.name)
    for _ in range(2):
        with pytest.raises(Conflict, match="another process ended"):
            renew(repo, lease, commit, HOUR)
        remove_old_generations(repo)
    advance(repo, 2 * HOUR + 1)
    remove_old_generations(repo)
    assert keys(repo, "leases/") == set()


def test_a_renewal_whose_response_was_lost_does_not_prevent_the_next_one(repo: Repository, faults: FaultyStore) -> None:
    lease, commit = take(repo, commit_bare(repo), HOUR)
    faults.inject(fail_after("put", key="leases/*/1"), fail_before("get", key="leases/*/1", times=2))
    with pytest.raises(StorageError):
        renew(repo, lease, commit, HOUR)
    faults.heal()
    assert renew(repo, lease, commit, HOUR)[0].generation == 2


# generations of leases that are over


def test_gc_deletes_a_lease_an_hour_after_it_expired(repo: Repository) -> None:
    lease, commit = take(repo, commit_bare(repo), HOUR)
    advance(repo, HOUR / 2)
    renew(repo, lease, commit, HOUR)
    advance(repo, 2 * HOUR - 1)
    remove_old_generations(repo)
    assert generations(repo, lease.name) == 2, "the first one too, because a listing may lack the second one"
    advance(repo, 2)
    remove_old_generations(repo)
    assert keys(repo, "leases/") == set()


def test_gc_reads_the_clock_before_it_lists_leases(repo: Repository, faults: FaultyStore) -> None:
    """The listing may lack a renewal that was on time."""
    lease, _ = take(repo, commit_bare(repo), HOUR)
    advance(repo, 2 * HOUR - 1)
    faults.inject(call_first("list", meanwhile(lambda: advance(repo, 2)), key="leases/"))
    remove_old_generations(repo)
    assert generations(repo, lease.name) == 1


def test_a_damaged_lease_counts_until_it_is_ended(repo: Repository) -> None:
    lease, _ = take(repo, commit_bare(repo), HOUR)
    (key,) = keys(repo, "leases/")
    repo.storage.replace(key, b"torn")
    advance(repo, 3 * HOUR)
    remove_old_generations(repo)
    with pytest.raises(Damaged, match=f"--delete {lease.name}"):
        tags(repo)
    delete_tag(repo, lease.name)
    assert tags(repo) == {}
    advance(repo, HOUR + 1)
    remove_old_generations(repo)
    assert keys(repo, "leases/") == set()


def test_a_lease_that_ends_after_it_was_listed_does_not_count(repo: Repository, faults: FaultyStore) -> None:
    lease, _ = take(repo, commit_bare(repo), HOUR)
    faults.inject(call_first("get", meanwhile(lambda: end_lease(repo, lease)), key="leases/*"))
    assert tags(repo.fresh()) == {}


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


def test_successive_leases_have_different_names_and_leave_nothing_behind(repo: Repository) -> None:
    commits, seen = [commit_bare(repo, "a", step) for step in (1, 2)], set[str]()
    for _ in range(5):
        for commit in commits:
            with Lease(repo, commit, HOUR) as lease:
                lease.renew()
                assert [tag.txid for tag in tags(repo).values()] == [commit.txid]
                seen |= tags(repo).keys()
    assert len(seen) == 10
    assert keys(repo, "leases/") == keys(repo, "tags/") == set()


def test_a_lease_lists_only_the_settings_and_needs_few_requests(repo: Repository, faults: FaultyStore) -> None:
    commit, calls = commit_bare(repo), list[str]()

    def made() -> list[str]:
        new = [f"{call.method} {call.key.split('/')[0]}" for call in faults.calls[len(calls) :]]
        calls.extend(new)
        return new

    made()
    with Lease(repo, commit, HOUR) as lease:
        assert made() == ["list settings", "put leases", "get commits"]
        lease.renew()
        assert made() == ["put leases"]
    assert made() == ["delete leases", "delete leases", "sweep leases"]


def test_the_leases_of_a_process_that_may_not_delete_also_end(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    faults.inject(fail_before("delete", key="leases/*", times=99, error=StorageError("denied")))
    with Lease(repo, commit_bare(repo), HOUR) as lease:
        lease.renew()
    assert (tags(repo), len(keys(repo, "leases/")), caplog.text) == ({}, 3, "")
    faults.heal()
    advance(repo, 2 * HOUR + 1)
    remove_old_generations(repo)
    assert keys(repo, "leases/") == set()


def test_a_lease_on_a_purged_checkpoint_is_rejected(repo: Repository) -> None:
    with pytest.raises(NotFound):
        Lease(repo, forget(repo, commit_bare(repo)), HOUR)
    assert keys(repo, "leases/") == set()


@pytest.mark.parametrize("ends", [forgets, purges])
def test_a_lease_is_not_granted_if_its_checkpoint_disappears_in_the_meantime(
    repo: Repository, faults: FaultyStore, ends: Callable[..., Callable[[], object]]
) -> None:
    commit = commit_bare(repo, "a", 1)
    faults.inject(call_first("put", meanwhile(ends(repo, commit)), key="leases/*"))
    with pytest.raises(NotFound, match="only a visible checkpoint can be leased"):
        take(repo, commit, HOUR)
    assert keys(repo, "leases/") == set()


def test_a_lease_moves_to_the_entries_that_are_brought_back_while_it_is_taken(
    repo: Repository, faults: FaultyStore
) -> None:
    whole = commit_bare(repo)
    thin = rewrite_bare(repo, whole, dropped=Dropped(entries=1, bytes=4, rule="--drop optim.*"))
    faults.inject(call_first("put", meanwhile(lambda: bring_back(repo, thin, whole.places)), key="leases/*"))
    lease, now = take(repo, thin, HOUR)
    assert (lease.txid, lease.generation, now.places) == (whole.txid, 1, whole.places)


def test_a_lease_is_renewed_in_the_background(repo: Repository, faults: FaultyStore) -> None:
    renewed = threading.Event()
    faults.inject(call_first("put", meanwhile(renewed.set), key="leases/*/3"))
    with Lease(repo, commit_bare(repo), 0.05):
        assert renewed.wait(60)


def test_a_failed_renewal_is_logged_and_retried(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with Lease(repo, commit_bare(repo, "a", 1), HOUR) as lease:
        faults.inject(fail_before("put", key="leases/*"))
        with caplog.at_level(logging.WARNING):
            assert not lease.renew()
        assert "a@1" in caplog.text
        assert "casckpt could not renew" in caplog.text
        assert lease.renew()
    assert keys(repo, "leases/") == set()


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
    faults.inject(fail_before("delete", key="leases/*"), fail_before("put", key="leases/*/1"))
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
