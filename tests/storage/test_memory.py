"""The storage in memory."""

from __future__ import annotations

from uuid import uuid4

import pytest

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


def test_one_space_for_one_name() -> None:
    name = uuid4().hex
    MemoryStore(name).put("a", b"1")
    assert MemoryStore(name).get("a", limit=1) == b"1"
    assert MemoryStore(name + "-other").size("a") is None


def test_counts() -> None:
    store = MemoryStore(uuid4().hex)
    store.put("a", bytes(10))
    store.get("a", limit=10)
    with store.open("a") as reader:
        reader.read_into(2, [memoryview(bytearray(3))])
    counts = store.counts
    assert (counts.puts, counts.bytes_written, counts.fsyncs) == (1, 10, 0)
    assert (counts.reads, counts.bytes_read, counts.requests) == (2, 13, 4)
