"""A host reads each record from the store once, a process decodes it once, and listings stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import casckpt
from casckpt.errors import Damaged
from casckpt.format import records
from casckpt.format.keys import commit_key
from casckpt.history.commits import forget, list_commits
from casckpt.storage.base import ListedObject
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.repositories import commit_bare, memory, repository

Decoded = list[str]


@contextmanager
def decodings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoded]:
    """The keys of the records that are decoded inside the block."""
    seen: Decoded = []
    decode = records.decode

    def counting(data: bytes, kind: Any, key: str) -> Any:
        seen.append(key)
        return decode(data, kind, key)

    with monkeypatch.context() as patch:
        patch.setattr(records, "decode", counting)
        yield seen


def test_a_save_decodes_only_new_records(store: casckpt.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(4)}
    store.save(state, step=0)
    for step in range(200):
        commit_bare(store.repository, "other", step)
    store.save(state, step=1)
    with decodings(monkeypatch) as seen:
        store.save(state, step=2)
    assert [key for key in seen if key.startswith("commits/")] == [commit_key(store.get("default@1").commit.txid)]


def test_a_different_process_reads_the_catalogue_and_then_only_new_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = memory()
    first = repository(tmp_path, inner)
    for step in range(20):
        commit_bare(first, step=step)
    list_commits(first)
    storage = FaultyStore(inner)
    other = repository(tmp_path, storage)
    assert len(list_commits(other).live()) == 20
    assert storage.keys("get") == ["casckpt.json"]
    made = commit_bare(first, step=20)
    with decodings(monkeypatch) as seen:
        assert len(list_commits(other).live()) == 21
    assert seen == [commit_key(made.txid)]


def test_additions_to_a_log_are_detected(tmp_path: Path) -> None:
    repo, other = repository(tmp_path, storage := memory()), repository(tmp_path, storage, seed=2)
    made = commit_bare(repo)
    assert [commit.last for commit in list_commits(repo).live()] == ["committed"]
    forget(other, made)
    assert [commit.last for commit in list_commits(repo).live()] == ["forgotten"]


def test_a_record_with_a_different_size_is_reread(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    made = commit_bare(repo)
    list_commits(repo)
    repo.storage.replace(commit_key(made.txid), b"torn")
    assert isinstance(list_commits(repo).damaged[made.txid], Damaged)
    assert isinstance(list_commits(repo).damaged[made.txid], Damaged)  # a damaged record is never cached


def test_a_fresh_read_detects_a_corrupted_known_record(tmp_path: Path) -> None:
    class Silent(MemoryStore):
        """Its listings do not show that content has changed, as in a folder on a disk with a flipped bit."""

        def list(self, prefix: str, **known: Any) -> Iterator[ListedObject]:
            return (ListedObject(entry.key, entry.size) for entry in super().list(prefix, **known))

    repo = repository(tmp_path, Silent(uuid4().hex))
    made = commit_bare(repo)
    list_commits(repo)
    data = repo.storage.get(commit_key(made.txid), limit=1 << 20)
    repo.storage.replace(commit_key(made.txid), data.replace(b"run", b"ruN"))
    assert made.txid in list_commits(repo).commits
    assert made.txid in list_commits(repo, anew=True).damaged
