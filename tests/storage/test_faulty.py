"""Storage that fails on demand fulfills the contract if no faults are planned, and otherwise fails as planned."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest

from casckpt.errors import Conflict, StorageError
from casckpt.storage import memory
from casckpt.storage.base import ObjectStore, ShortObject
from casckpt.storage.memory import MemoryStore
from tests.storage.contract import Peek, StorageContract
from tests.support.faulty import Call, Fault, FaultyStore, call_first, corrupt, fail_after, fail_before, truncate

pytestmark = pytest.mark.usefixtures("uncounted")


class TestContract(StorageContract):
    @pytest.fixture
    def storage(self) -> ObjectStore:
        return FaultyStore(MemoryStore(uuid4().hex))

    @pytest.fixture
    def peek(self, storage: FaultyStore) -> Peek:
        return memory._SPACES[storage.url.removeprefix("memory://")].get


def faulty(*plan: Fault) -> FaultyStore:
    return FaultyStore(MemoryStore(uuid4().hex), plan)


def test_faults_can_occur_before_and_after_calls() -> None:
    store = faulty(fail_before("put", at=2), fail_after("put", key="b", error=Conflict("mine")))
    store.put("a", b"")
    with pytest.raises(StorageError, match="put c"):
        store.put("c", b"")
    with pytest.raises(Conflict, match="mine"):
        store.put("b", b"")
    store.put("c", b"")
    assert [store.size(key) for key in "abc"] == [0, 0, 0]
    assert store.calls[:3] == [Call("put", "a"), Call("put", "c"), Call("put", "b")]
    assert (store.count("put"), store.count("put", "c"), store.keys("size")) == (4, 2, ["a", "b", "c"])


def test_faults_can_be_limited_in_number_and_removed() -> None:
    store = faulty()
    store.inject(fail_before("list", times=2), fail_before("size", times=9))
    for _ in range(2):
        with pytest.raises(StorageError):
            list(store.list("a/"))
    assert list(store.list("a/")) == []
    store.heal()
    assert store.size("a") is None


def test_faults_can_corrupt_the_bytes_that_a_read_returns() -> None:
    store = faulty(truncate("get"), corrupt("get", at=2), truncate("read_into"), corrupt("read_into", at=2))
    store.put("a", b"abcd")
    assert store.get("a", limit=9) == b"ab"
    assert store.get("a", limit=9) == b"ab#d"
    buffer = bytearray(4)
    with store.open("a") as reader:
        with pytest.raises(ShortObject):
            reader.read_into(0, [memoryview(buffer)])
        reader.read_into(0, [memoryview(buffer)])
        assert buffer == b"ab#d"
        reader.read_into(0, [memoryview(buffer)])
        assert buffer == b"abcd"


def test_a_hook_runs_before_the_call_that_it_was_added_to() -> None:
    store = faulty()
    seen: list[tuple[Call, int | None]] = []
    store.inject(call_first("put", lambda call: seen.append((call, store.inner.size("a")))))
    store.put("a", b"1")
    assert seen == [(Call("put", "a"), None)]


@pytest.mark.parametrize(
    ("make", "method", "at"),
    [(corrupt, "put", 1), (truncate, "list", 1), (fail_before, "rename", 1), (fail_after, "get", 0)],
)
def test_invalid_faults_are_rejected(make: Callable[..., Fault], method: str, at: int) -> None:
    with pytest.raises(ValueError, match=r"no such call|only reads"):
        make(method, at=at)
