"""A store that was restored from a backup: caches of the earlier store are no longer used."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from casckpt.contents import manifests
from casckpt.errors import Damaged
from casckpt.history import commits
from casckpt.history.commits import list_commits
from casckpt.history.tags import delete_tag, get_tag, list_tags, set_tag, write_generation
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.repair.verify import verify
from tests.support.copies import copy
from tests.support.far import FarStore
from tests.support.gcs import LAST, run_gc
from tests.support.repositories import Ticks, memory, repository, save

KINDS = ["folder", "bucket"]


class Store:
    """A store in a folder or a bucket that can be restored to an earlier state."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.clock = path, Ticks()
        self.storage = LocalStore(path / "store") if kind == "folder" else FarStore(memory())
        self.copy: dict[str, bytes] = {}

    def seen_from(self, host: str, seed: int = 1) -> Repository:
        """Open the store in a new process on ``host``."""
        return repository(self.path / host, self.storage, clock=self.clock, seed=seed)

    def keep(self) -> None:
        """Back up the store."""
        if isinstance(self.storage, LocalStore):
            shutil.copytree(self.storage.path, self.path / "copy")
        else:
            listed = self.storage.list("")
            self.copy = {entry.key: self.storage.get(entry.key, limit=1 << 30) for entry in listed}

    def put_back(self) -> None:
        """Restore the backup."""
        if isinstance(self.storage, LocalStore):
            shutil.rmtree(self.storage.path)
            shutil.copytree(self.path / "copy", self.storage.path)
        else:
            for entry in list(self.storage.list("")):
                self.storage.delete(entry.key)
            for key, data in self.copy.items():
                self.storage.put(key, data)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(tmp_path, request.param)


@pytest.mark.parametrize("tagging", ["same process", "same host", "another host"])
@pytest.mark.parametrize("collecting", ["same process", "another process"])
def test_a_tag_set_again_after_a_restored_backup_protects_its_checkpoint(
    store: Store, tagging: str, collecting: str
) -> None:
    repo = store.seen_from("host")
    made = [save(repo, "a", step, texts=[f"own {step}"]) for step in range(5)]
    set_tag(repo, "t", made[1])
    store.keep()
    set_tag(repo, "t", made[2])
    assert list_tags(repo).tags["t"].txid == made[2].txid
    store.put_back()
    other = {"same process": repo, "same host": store.seen_from("host", 2), "another host": store.seen_from("far", 3)}
    set_tag(other[tagging], "t", made[3])
    run_gc(repo if collecting == "same process" else store.seen_from("host", 4), LAST, min_age=0.0)
    assert [commit.step for commit in list_commits(store.seen_from("new", 5)).live()] == [3, 4]


def test_a_restored_backup_is_reported_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    repo = store.seen_from("host")
    save(repo, "a", 0)
    store.keep()
    gone = save(repo, "a", 1)
    list_commits(repo)
    store.put_back()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [commit.step for commit in list_commits(repo).live()] == [0]
        assert [commit.step for commit in list_commits(store.seen_from("host", 2)).live()] == [0]
    assert [gone.txid in record.getMessage() for record in caplog.records] == [True]


def test_a_new_process_notices_a_restored_backup(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    repo = store.seen_from("host")
    store.keep()
    save(repo, "a", 1)
    list_commits(repo)
    store.put_back()
    with caplog.at_level(logging.WARNING):
        assert list_commits(store.seen_from("host", 2)).commits == {}
    assert len(caplog.records) == 1


def test_a_repeated_copy_uses_a_different_transaction(tmp_path: Path, source: Repository) -> None:
    """With the same transaction and ID, it would have different blobs."""
    store = Store(tmp_path, "bucket")
    repo = store.seen_from("host")
    first, *_, newest = list_commits(source).live()
    copy(source, repo, first)
    store.keep()
    copy(source, repo, newest)  # one of its blobs is shared with the first copy
    manifests.learn(repo, list_commits(repo).live())
    store.put_back()
    other = store.seen_from("another host", 2)
    commits.forget(other, list_commits(other).live()[0])
    run_gc(other, min_age=0.0)
    copy(source, other, newest)
    run_gc(store.seen_from("host", 3), min_age=0.0)
    assert not verify(store.seen_from("new", 4)).is_damaged


def test_lost_tags_protect_their_checkpoints_until_they_are_set_or_deleted(store: Store) -> None:
    repo = store.seen_from("host")
    made = [save(repo, "a", step, texts=[f"own {step}"]) for step in range(3)]
    set_tag(repo, "t", made[0])
    list_tags(repo)
    for entry in list(store.storage.list("tags/")):
        store.storage.delete(entry.key)
    for again in (repo, store.seen_from("host", seed=2)):
        with pytest.raises(Damaged, match=r"tags/t/0 is missing.*Set the tag again, or delete it"):
            run_gc(again, LAST, min_age=0)
        assert len(list_commits(again).live()) == 3
        assert [key for key, _ in verify(again).records] == ["tags/t"]
    set_tag(repo, "t", made[1])
    assert {commit.step for commit in run_gc(repo, LAST, min_age=0).purged} == {0}


def test_a_lost_tag_can_be_deleted(store: Store) -> None:
    repo = store.seen_from("host")
    made = save(repo, "a", 0)
    set_tag(repo, "t", made)
    store.keep()
    write_generation(repo, "t", 1, made)  # the process died before it recorded the tag
    write_generation(repo, "other", 0, made)
    assert list_tags(repo).tags["t"].generation == 1
    store.put_back()
    assert list_tags(repo).damaged.keys() == {"t", "other"}
    delete_tag(repo, "t")
    delete_tag(repo, "other")
    assert (list_tags(repo).tags, list_tags(repo).damaged) == ({}, {})


def test_a_completely_restored_backup_includes_its_tags(store: Store) -> None:
    repo = store.seen_from("host")
    made = save(repo, "a", 0)
    set_tag(repo, "t", made)
    store.keep()
    set_tag(repo, "t", save(repo, "a", 1))
    assert list_tags(repo).tags["t"].generation == 1
    list_commits(repo)
    store.put_back()
    assert get_tag(store.seen_from("host", seed=2), "t") == list_tags(repo).tags["t"]
    assert list_tags(repo).tags["t"].txid == made.txid
