from __future__ import annotations

from uuid import uuid4

from casckpt.storage.memory import MemoryStore
from tests.support.counting import count_io


def test_the_storage_counts_calls_and_bytes() -> None:
    store = MemoryStore(uuid4().hex)
    counts = count_io(store)
    store.put("a", bytes(10))
    store.get("a", limit=10)
    with store.open("a") as reader:
        reader.read_into(2, [memoryview(bytearray(3))])
    assert (counts.puts, counts.bytes_written, counts.fsyncs) == (1, 10, 0)
    assert (counts.reads, counts.bytes_read, counts.requests) == (2, 13, 4)
