"""Tags: generations, competing changes, and no tag on a purged checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casckpt.errors import CasckptError, Conflict, Damaged, InvalidInput, NotFound, Refused, Revoked, StorageError
from casckpt.format.keys import tag_key
from casckpt.format.records import TaggedRecord
from casckpt.history.commits import Commit, forget, list_commits, purge
from casckpt.history.leases import hold
from casckpt.history.tags import (
    delete_tag,
    get_tag,
    list_tags,
    named_by,
    remove_old_generations,
    set_tag,
    tagged_txids,
    tags,
    tags_of,
    write_generation,
)
from casckpt.history.transactions import revoke
from casckpt.repository.repository import Repository
from casckpt.storage.base import Known, ListedObject, ObjectStore
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.gcs import keys, ticking
from tests.support.repositories import again, commit_bare, meanwhile, memory, objects_of, repository


def named(repo: Repository) -> dict[str, str]:
    return {name: tag.txid for name, tag in tags(repo).items()}


def test_a_tag_can_be_moved_and_deleted(repo: Repository) -> None:
    one, two = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    assert tags(repo) == {}
    first = set_tag(repo, "best", one)
    assert (first.name, first.generation, first.txid, first.manifest) == ("best", 0, one.txid, one.id)
    second = set_tag(repo, "best", two)
    set_tag(repo, "base", two)
    assert named(repo) == {"base": two.txid, "best": two.txid}
    assert get_tag(repo, "best") == second
    assert tags_of(tags(repo), two.id) == ["base", "best"]
    assert tags_of(tags(repo), one.id) == []
    delete_tag(repo, "best")
    assert named(repo) == {"base": two.txid}
    assert get_tag(repo, "best") is None
    set_tag(repo, "best", one)
    assert get_tag(repo, "best") == tags(repo)["best"]
    assert tags(repo)["best"].generation == 3


def test_a_tag_that_leaves_a_run_says_what_it_no_longer_protects(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, other = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2), commit_bare(repo, "b", 1)
    for commit in (one, two):
        set_tag(repo, "best", commit)
    assert caplog.messages == []
    set_tag(repo, "best", other)
    (text,) = caplog.messages
    assert f"tag best moves from run a to run b, and no longer protects {two}" in text


def test_generations_are_compared_numerically(repo: Repository) -> None:
    commits = [commit_bare(repo, "a", step) for step in range(12)]
    for commit in commits:
        set_tag(repo, "best", commit)
    assert named(repo) == {"best": commits[-1].txid}


def test_tags_with_a_common_prefix_are_separate(repo: Repository) -> None:
    commit = commit_bare(repo)
    set_tag(repo, "best-ever", commit)
    assert get_tag(repo, "best") is None
    assert set_tag(repo, "best", commit).generation == 0


@pytest.mark.parametrize("name", ["", "Best", "a/b", "../x", "a b", ".x", "a" * 101, "ä"])
def test_invalid_tag_names_are_rejected(repo: Repository, name: str) -> None:
    commit = commit_bare(repo)
    with pytest.raises(InvalidInput):
        set_tag(repo, name, commit)
    with pytest.raises(InvalidInput):
        delete_tag(repo, name)
    with pytest.raises(InvalidInput):
        get_tag(repo, name)
    assert list(repo.storage.list("tags/")) == []


def test_the_error_for_deleting_a_missing_tag_lists_tags(repo: Repository) -> None:
    with pytest.raises(NotFound, match="there are none"):
        delete_tag(repo, "best")
    set_tag(repo, "best", commit_bare(repo))
    with pytest.raises(NotFound, match=r"no tag 'bets'.*best"):
        delete_tag(repo, "bets")
    delete_tag(repo, "best")
    with pytest.raises(NotFound):
        delete_tag(repo, "best")


def test_tagging_restores_a_forgotten_checkpoint(repo: Repository) -> None:
    forgotten = forget(repo, commit_bare(repo))
    set_tag(repo, "best", forgotten)
    assert list_commits(repo).commits[forgotten.txid].visible


def test_tagging_a_checkpoint_with_a_visible_twin_is_a_conflict(repo: Repository) -> None:
    forgotten = forget(repo, commit_bare(repo, "a", 1))
    commit_bare(repo, "a", 1)
    with pytest.raises(Conflict, match="visible under the same run and step"):
        set_tag(repo, "best", forgotten)
    assert tags(repo) == {}


def test_tagging_a_purged_or_revoked_checkpoint_is_a_conflict(repo: Repository) -> None:
    with pytest.raises(Conflict, match="purged"):
        set_tag(repo, "best", purge(repo, forget(repo, commit_bare(repo))))
    txid = repo.new_txid("a", 1)
    revoke(repo, txid, "x")
    with pytest.raises(Revoked):
        set_tag(repo, "best", list_commits(repo).commits[txid])
    assert tags(repo) == {}


def test_a_checkpoint_forgotten_during_tagging_is_restored(repo: Repository, faults: FaultyStore) -> None:
    commit = commit_bare(repo)
    faults.inject(call_first("put", meanwhile(lambda: forget(repo, commit)), key="tags/*"))
    set_tag(repo, "best", commit)
    assert list_commits(repo).commits[commit.txid].visible


TAKEN: dict[str, Callable[[Repository, Commit], object]] = {
    "just purged": lambda repo, commit: purge(repo, forget(repo, commit)),
    "visible under the same run and step": lambda repo, commit: (forget(repo, commit), commit_bare(repo, "a", 1)),
}


@pytest.mark.parametrize("had_one", [False, True])
@pytest.mark.parametrize("why", TAKEN)
def test_a_tag_is_undone_if_its_checkpoint_is_being_purged_or_overwritten(
    repo: Repository, faults: FaultyStore, why: str, had_one: bool
) -> None:
    commit, other = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    if had_one:
        set_tag(repo, "best", other)
    faults.inject(call_first("put", meanwhile(lambda: TAKEN[why](repo, commit)), key="tags/*"))
    with pytest.raises(Conflict, match=why):
        set_tag(repo, "best", commit)
    assert named(repo) == ({"best": other.txid} if had_one else {})


def test_a_tag_whose_response_was_lost_is_set(repo: Repository, faults: FaultyStore) -> None:
    commit = commit_bare(repo)
    faults.inject(fail_after("put", key="tags/*"))
    assert set_tag(repo, "best", commit).generation == 0
    assert len(list(repo.storage.list("tags/"))) == 1


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_exactly_one_of_eight_simultaneous_moves_of_a_tag_succeeds(tmp_path: Path, where: str) -> None:
    storage = memory() if where == "memory" else LocalStore(tmp_path / "store")
    repo = repository(tmp_path, storage)
    set_tag(repo, "best", commit_bare(repo, "a", 99))
    commits = [commit_bare(repo, "a", step) for step in range(8)]
    barrier = threading.Barrier(8, timeout=60)
    won: list[str] = []
    lost: list[str] = []

    def run(index: int) -> None:
        wait = call_first("put", meanwhile(barrier.wait), key="tags/*")
        mine = repository(tmp_path, FaultyStore(storage, [wait]), seed=index)
        try:
            won.append(set_tag(mine, "best", commits[index]).txid)
        except Conflict as error:
            lost.append(str(error))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert all("another process has just moved" in message for message in lost)
    assert named(repo) == {"best": won[0]}
    assert tags(repo)["best"].generation == 1


def test_only_one_of_two_processes_that_set_a_tag_simultaneously_succeeds(tmp_path: Path) -> None:
    storage = memory()
    commit = commit_bare(repository(tmp_path, storage))
    other = repository(tmp_path, storage, seed=2, clock=lambda: 5)
    first = call_first("put", meanwhile(lambda: set_tag(other, "best", commit)), key="tags/*")
    repo = repository(tmp_path, FaultyStore(storage, [first]), seed=3, clock=lambda: 5)
    with pytest.raises(Conflict):
        set_tag(repo, "best", commit)


def test_a_damaged_tag_does_not_affect_listings_but_prevents_gc(repo: Repository) -> None:
    commit = commit_bare(repo)
    set_tag(repo, "good", commit)
    set_tag(repo, "bad", commit)
    set_tag(repo, "bad", commit)
    repo.storage.replace(tag_key("bad", 1), b"torn")
    found = list_tags(repo)
    assert found.tags.keys() == {"good"}
    assert isinstance(found.damaged["bad"], Damaged)
    with pytest.raises(Damaged, match="tags/bad/1"):
        tags(repo)
    with pytest.raises(Damaged):
        get_tag(repo, "bad")
    assert set_tag(repo, "bad", commit).generation == 2
    assert tags(repo).keys() == {"good", "bad"}


def test_a_damaged_tag_can_be_deleted_as_its_error_advises(repo: Repository) -> None:
    set_tag(repo, "bad", commit_bare(repo))
    repo.storage.replace(tag_key("bad", 0), b"torn")
    with pytest.raises(Damaged, match=r"Set the tag again, or delete it .*--delete bad"):
        tags(repo)
    delete_tag(repo, "bad")
    assert tags(repo) == {}
    with pytest.raises(NotFound):
        delete_tag(repo, "bad")


def test_a_record_of_a_different_tag_is_rejected(repo: Repository) -> None:
    set_tag(repo, "one", commit_bare(repo))
    repo.storage.put(tag_key("two", 0), repo.storage.get(tag_key("one", 0), limit=1 << 20))
    with pytest.raises(Refused, match="'one'"):
        get_tag(repo, "two")


def test_each_tag_record_is_read_only_once(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    set_tag(repo, "one", commit_bare(repo))
    tags(repo)
    reads = faults.count("get", "tags/*")
    tags(repository(tmp_path, faults))
    assert faults.count("get", "tags/*") == reads == 1


# tags by id


def test_a_tag_set_on_any_commit_refers_to_the_checkpoint_id(repo: Repository) -> None:
    old = commit_bare(repo, "a", 1)
    set_tag(repo, "best", old)
    (tag,) = tags(repo).values()
    forget(repo, list_commits(repo).commits[old.txid])
    again = commit_bare(repo, "a", 1, manifest=old.id)
    other = commit_bare(repo, "a", 2)
    assert tagged_txids(tags(repo), [old, again, other]) == {old.txid, again.txid}
    assert named_by(tag, list_commits(repo)) == again, "what is visible answers"
    forget(repo, again)
    found = named_by(tag, list_commits(repo))
    assert found is not None
    assert found.txid == old.txid
    purge(repo, found)
    assert named_by(tag, list_commits(repo)) == list_commits(repo).commits[again.txid], "it can be restored"


# old generations


def cleaned(repo: Repository) -> set[str]:
    remove_old_generations(repo)
    return keys(repo, "tags/")


def test_only_the_newest_generation_of_an_expired_tag_is_kept(repo: Repository) -> None:
    commit = commit_bare(repo)
    for name in ("ends", "lasts", "deleted"):
        hold(repo, name, commit, 3600)
        hold(repo, name, commit, 3600)
    set_tag(repo, "lasts", commit)
    delete_tag(repo, "deleted")
    lasts = {tag_key("lasts", number) for number in range(3)}
    ends = {tag_key("ends", number) for number in range(2)}
    assert cleaned(repo) == lasts | ends | {tag_key("deleted", 2)}
    ticking(repo)(3601)
    assert cleaned(repo) == lasts | ends | {tag_key("deleted", 2)}, "a clock may be behind"
    ticking(repo)(3600)
    assert cleaned(repo) == lasts | {tag_key("ends", 1), tag_key("deleted", 2)}
    assert named(repo) == {"lasts": commit.txid}
    assert hold(repo, "ends", commit, 3600)[0].generation == 2
    assert set_tag(repo, "deleted", commit).generation == 3


def test_a_delayed_cleanup_does_not_lead_to_the_reuse_of_a_generation_number(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    """The cleanup chooses what to delete, and then pauses.

    Meanwhile, the tag is set again, and a different process cleans up.
    """
    commit = commit_bare(repo)
    hold(repo, "eval", commit, 1)
    hold(repo, "eval", commit, 1)
    ticking(repo)(7200)
    other = repository(tmp_path / "other", faults, clock=repo.clock, seed=2)

    def anew() -> None:
        remove_old_generations(other)
        hold(other, "eval", commit, 3600)

    faults.inject(call_first("delete", meanwhile(anew), key="tags/*"))
    remove_old_generations(repo)
    assert named(repo) == {"eval": commit.txid}


def test_a_tag_that_disappears_after_it_was_listed_counts_as_expired(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    commit = commit_bare(repo)
    hold(repo, "eval", commit, 1)
    set_tag(repo, "best", commit)
    fresh = repository(tmp_path / "fresh", faults, clock=repo.clock, seed=2)
    gone = meanwhile(lambda: faults.inner.delete(tag_key("eval", 0)))
    faults.inject(call_first("get", gone, key="tags/eval/0"))
    assert named(fresh) == {"best": commit.txid}


def test_a_newest_generation_that_is_listed_but_missing_is_reported_as_damage(
    tmp_path: Path, repo: Repository, faults: FaultyStore
) -> None:
    set_tag(repo, "best", commit_bare(repo))
    fresh = repository(tmp_path / "fresh", faults, seed=2)
    faults.inject(fail_before("get", key="tags/*", error=NotFound("a permission is missing")))
    with pytest.raises(Damaged, match="best"):
        tags(fresh)


def test_a_tag_with_an_unreadable_newest_generation_is_not_cleaned_up(repo: Repository) -> None:
    commit = commit_bare(repo)
    hold(repo, "eval", commit, 1)
    hold(repo, "eval", commit, 1)
    ticking(repo)(7200)
    repo.storage.replace(tag_key("eval", 1), b"torn")
    assert cleaned(repo) == {tag_key("eval", 0), tag_key("eval", 1)}


# tags that are missing


def left_out(repo: Repository, tmp_path: Path, *left: str) -> Repository:
    """Restore a copy of the store without the keys that begin with ``left``, on a host that has not seen it."""
    objects = {key: data for key, data in objects_of(repo.storage).items() if not key.startswith(left)}
    return repository(tmp_path / "restored", again(objects), clock=repo.clock, seed=9)


def damaged(repo: Repository) -> dict[str, CasckptError]:
    return dict(list_tags(repo, listed=list_commits(repo)).damaged)


@pytest.mark.parametrize("way", ["set", "expires", "deleted"])
def test_a_tag_that_a_restored_copy_lacks_is_damaged_until_it_is_set_or_deleted(
    repo: Repository, tmp_path: Path, way: str
) -> None:
    commit = commit_bare(repo)
    for _ in range(3):
        set_tag(repo, "best", commit)
    set_tag(repo, "base", commit)
    restored = left_out(repo, tmp_path, "tags/best/")
    assert named(restored) == {"base": commit.txid}, "loads do not look"
    with pytest.raises(Damaged, match=r"tags/best/2 is missing.*Set the tag again, or delete it"):
        tags(restored, listed=list_commits(restored))
    if way == "set":
        assert set_tag(restored, "best", commit).generation == 3
    elif way == "expires":
        Store(restored).tag("best", commit.id, expires="1h")
    else:
        delete_tag(restored, "best")
    assert damaged(restored) == {}
    assert list(tags(restored, listed=list_commits(restored))) == (["base"] if way == "deleted" else ["base", "best"])


def test_tags_from_an_older_copy_are_damaged(repo: Repository, tmp_path: Path) -> None:
    one, two = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    set_tag(repo, "best", one)
    set_tag(repo, "best", two)
    restored = left_out(repo, tmp_path, "tags/best/1")
    assert damaged(restored).keys() == {"best"}
    set_tag(restored, "best", two)
    assert damaged(restored) == {}


def test_an_error_about_a_missing_tag_counts_the_others(repo: Repository, tmp_path: Path) -> None:
    commit = commit_bare(repo)
    for name in ("a", "b", "c"):
        set_tag(repo, name, commit)
    restored = left_out(repo, tmp_path, "tags/")
    with pytest.raises(Damaged, match=r"--delete a`.*2 more tags have the same problem"):
        tags(restored, listed=list_commits(restored))


def test_deleted_and_unrecorded_tags_are_never_missing(repo: Repository, tmp_path: Path) -> None:
    commit = commit_bare(repo)
    set_tag(repo, "deleted", commit)
    delete_tag(repo, "deleted")
    remove_old_generations(repo)
    assert damaged(repo) == {}
    write_generation(repo, "unrecorded", 0, commit)
    assert damaged(left_out(repo, tmp_path, "tags/unrecorded/")) == {}


@pytest.mark.parametrize("folder", ["tags", "commits"])
def test_a_tag_that_could_not_be_set_or_recorded_is_not_missing(
    repo: Repository, faults: FaultyStore, folder: str
) -> None:
    commit = commit_bare(repo)
    faults.inject(fail_before("put", key=f"{folder}/*"))
    with pytest.raises(StorageError):
        set_tag(repo, "best", commit)
    assert (list(named(repo)), damaged(repo)) == (["best"] if folder == "commits" else [], {})


def test_a_tag_set_while_commits_are_listed_is_not_missing(tmp_path: Path) -> None:
    storage = memory()
    commit = commit_bare(repository(tmp_path, storage))
    other = repository(tmp_path / "other", storage, seed=2)
    setting = call_first("list", meanwhile(lambda: set_tag(other, "best", commit)), key="tags/")
    repo = repository(tmp_path, FaultyStore(storage, [setting]), seed=3)
    assert damaged(repo) == {}


def test_a_tag_deleted_and_cleaned_up_while_tags_are_listed_is_not_missing(tmp_path: Path) -> None:
    """The listing sees neither the new generation nor the old one."""
    storage = memory()
    other = repository(tmp_path / "other", storage, seed=2)
    set_tag(other, "best", commit_bare(other))

    def delete() -> None:
        delete_tag(other, "best")
        remove_old_generations(other)

    torn = Torn(storage, delete)
    repo = repository(tmp_path, torn, seed=3)
    listed = list_commits(repo)
    torn.is_armed = True
    assert list_tags(repo, listed=listed).damaged == {}
    assert not torn.is_armed


class Torn(FaultyStore):
    """Once armed, a listing of tags begins before ``meanwhile``, and sees only what it did not change."""

    def __init__(self, inner: ObjectStore, meanwhile: Callable[[], object]) -> None:
        super().__init__(inner)
        self.is_armed, self._meanwhile = False, meanwhile

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        before = [*super().list(prefix, known=known)]
        if not (self.is_armed and prefix == "tags/"):
            return iter(before)
        self.is_armed = False
        self._meanwhile()
        return iter(set(before) & {*super().list(prefix, known=known)})


def test_a_recorded_tag_must_have_a_valid_name(repo: Repository) -> None:
    with pytest.raises(InvalidInput):
        TaggedRecord(txid=repo.new_txid("a", 1), time=0, name="../x", generation=0)
    with pytest.raises(Refused):
        TaggedRecord(txid=repo.new_txid("a", 1), time=0, name="x", generation=-1)
