"""Tests of storage in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from uuid import uuid4

import pytest

from casckpt.errors import Unsupported
from casckpt.storage import memory
from casckpt.storage.base import ObjectStore
from casckpt.storage.memory import MemoryStore
from tests.storage.contract import Peek, StorageContract


class TestContract(StorageContract):
    @pytest.fixture
    def storage(self) -> ObjectStore:
        return MemoryStore(uuid4().hex)

    @pytest.fixture
    def peek(self, storage: MemoryStore) -> Peek:
        return memory._SPACES[storage.name].get


def test_stores_with_the_same_name_share_memory() -> None:
    name = uuid4().hex
    MemoryStore(name).put("a", b"1")
    assert MemoryStore(name).get("a", limit=1) == b"1"
    assert MemoryStore(name + "-other").size("a") is None


def test_a_memory_store_is_rejected_in_a_different_process(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(uuid4().hex)
    store.put("a", b"1")
    pickled = pickle.dumps(store)
    monkeypatch.setattr(memory, "_HOME", b"another process")
    copy = pickle.loads(pickled)
    calls: list[Callable[[], object]] = [
        lambda: copy.put("b", b"2"), lambda: copy.replace("b", b"2"), lambda: copy.delete("a"), lambda: copy.size("a"),
        lambda: copy.get("a", limit=1), lambda: copy.open("a"), lambda: copy.list(""), lambda: copy.list_folder("a"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(Unsupported, match="memory of another process"):
            call()
    assert pickle.dumps(copy) == pickled  # copies of copies keep their origin
