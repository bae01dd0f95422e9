"""A process remembers only a limited amount about each store, and does not mix up stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.format.names import TxId
from casckpt.history.commits import list_commits
from casckpt.history.following import greatest, look_at_all
from casckpt.history.tags import set_tag, tags
from casckpt.repository import caches
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository
from tests.support.repositories import Ticks, commit_bare, repository, save
from tests.support.saves import reopened, small

STATE = {"w": torch.arange(6.0), "x": [1]}


def test_a_save_does_not_claim_announcements_that_another_thread_read_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The clock of a different host is ahead, so the save of that host remains the newest."""
    store = small()
    store.save(STATE, run="a", step=1)
    ahead = repository(tmp_path, store.repository.storage, clock=Ticks(store.repository.clock() + 10**9))

    def meanwhile(repo: Repository, known: RunCache, run: str) -> TxId | None:
        found = greatest(repo, known, run)
        commit_bare(ahead, run, 2)
        look_at_all(repo, run)  # by another thread of this process
        return found

    monkeypatch.setattr("casckpt.history.transactions.greatest", meanwhile)
    store.save(STATE, run="a", step=3)
    monkeypatch.undo()
    assert reopened(store).get("a@latest").step == list_commits(store.repository).visible()[-1].step == 2


def fresh(tmp_path: Path, repo: Repository) -> Repository:
    """Return the repository as a new process opens it, with nothing in memory."""
    return repository(tmp_path, repo.storage)


def test_the_manifest_cache_is_bounded(tmp_path: Path, repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MAX_MANIFESTS", 2)
    one, two, three = (save(repo, "a", step) for step in range(3))
    other = fresh(tmp_path, repo)
    for commit in (one, two, one, three):
        manifests.get(other, commit)
    held = [other.manifests.get(commit.txid, commit.committed.head) is not None for commit in (one, two, three)]
    assert held == [True, False, True]
    monkeypatch.setattr(caches, "MAX_BYTES", 10)
    manifests.get(other, two)
    assert other.manifests.get(two.txid, two.committed.head) is not None
    assert other.manifests.get(one.txid, one.committed.head) is None


def test_records_that_do_not_fit_into_the_memory_cache_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "MAX_RECORDS", 3)
    repo = repository(tmp_path)
    made = [commit_bare(repo, step=step) for step in range(8)]
    set_tag(repo, "best", made[0])
    for _ in range(2):
        assert [commit.txid for commit in list_commits(repo).live()] == [commit.txid for commit in made]
        assert tags(repo)["best"].txid == made[0].txid


def test_changing_metadata_does_not_affect_the_cache(store: casckpt.Store) -> None:
    store.save({"w": torch.ones(4)}, step=0, metadata={"scores": [1]})
    store.get("latest").metadata["scores"].append(2)
    assert store.get("latest").metadata == {"scores": [1]}
