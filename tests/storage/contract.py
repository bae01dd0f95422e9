"""The contract that every storage backend fulfills: one suite for all of them, with direct access to the objects.

A subclass provides two fixtures: ``storage``, which is empty, and ``peek``, which reads an object (None if it is
missing) without the storage under test. `SharedContract` is for storage that other processes can reach.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from casckpt.errors import InvalidInput, NotFound, Refused, StorageError
from casckpt.storage.base import AlreadyExists, ListedObject, ObjectStore, ShortObject
from casckpt.storage.buffers import AlignedBuffer
from tests.support.afresh import afresh
from tests.support.repositories import START

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

Peek = Callable[[str], bytes | None]
MIB = 1 << 20
SIZES = [0, 1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 9 * MIB + 17]
OBJECT = "objects/x/a.safetensors"


def of_each_size(choices: list[Any]) -> list[Any]:
    """Yield each size with the two options alternately, or with both options under --full."""
    return [
        pytest.param(size, choices[which], marks=[pytest.mark.soak] * ((number + which) % 2))
        for number, size in enumerate(SIZES)
        for which in (0, 1)
    ]


def noise(size: int, seed: int = 0) -> bytes:
    """Return pseudorandom bytes that depend on the seed."""
    return np.random.default_rng(seed).bytes(size)


def _race(store: ObjectStore, key: str, number: int) -> bool:
    try:
        store.put(key, noise(2 * MIB + 5, number))
    except AlreadyExists:
        return False
    return True


def _race_process(store: ObjectStore, number: int, start: Barrier, answers: SimpleQueue[tuple[int, bool]]) -> None:
    start.wait()
    answers.put((number, _race(store, "commits/1", number)))


class StorageContract:
    """The guarantees of `casckpt.storage.base.ObjectStore` within one process."""

    def test_the_storage_implements_the_protocol_of_a_store(self, storage: ObjectStore) -> None:
        assert isinstance(storage, ObjectStore)
        assert storage.traits.parallel >= 1
        assert storage.url

    @pytest.mark.parametrize(("size", "settle"), of_each_size([False, True]))
    def test_an_object_can_be_read_after_a_put(self, storage: ObjectStore, peek: Peek, size: int, settle: bool) -> None:
        data = noise(size)
        storage.put(OBJECT, data, settle=settle)
        assert peek(OBJECT) == data
        assert storage.get(OBJECT, limit=size) == data
        assert storage.size(OBJECT) == size
        assert list(storage.list("objects/")) == [ListedObject(OBJECT, size)]

    def test_a_listing_has_the_time_of_each_object_or_of_none(self, storage: ObjectStore, peek: Peek) -> None:
        for key in ("objects/x/a", "objects/x/b"):
            storage.put(key, b"x")
        times = [entry.time for entry in sorted(storage.list("objects/"), key=lambda entry: entry.key)]
        folder = [entry.time for entry in sorted(storage.list_folder("objects/x")[0], key=lambda entry: entry.key)]
        assert times == folder
        if storage.url.startswith("memory:"):
            assert times == [None, None]
        else:
            assert START < (times[0] or 0) <= (times[1] or 0) < 2 * START, "microseconds"

    @pytest.mark.parametrize(("size", "shift"), of_each_size([0, 1])[2:])
    def test_put_accepts_an_aligned_buffer(self, storage: ObjectStore, peek: Peek, size: int, shift: int) -> None:
        data = noise(size)
        with AlignedBuffer(size + shift) as buffer:
            buffer.view[shift:] = data
            storage.put("a", buffer.view[shift:].toreadonly())
            assert bytes(buffer.view[shift:]) == data
        assert peek("a") == data

    def test_put_accepts_memoryviews_of_any_format(self, storage: ObjectStore, peek: Peek) -> None:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        storage.put("a", array.data)
        storage.put("b", np.zeros((0, 3)).data)
        assert peek("a") == array.tobytes()
        assert peek("b") == b""

    def test_put_rejects_noncontiguous_buffers(self, storage: ObjectStore, peek: Peek) -> None:
        with pytest.raises(InvalidInput, match="contiguous"):
            storage.put("a", memoryview(b"abcdef")[::2])
        assert peek("a") is None

    def test_put_never_replaces_an_object(self, storage: ObjectStore, peek: Peek) -> None:
        storage.put("tags/t/0", b"first")
        for data in (b"second", b"first", b""):
            with pytest.raises(AlreadyExists) as caught:
                storage.put("tags/t/0", data)
            assert caught.value.key == "tags/t/0"
        assert peek("tags/t/0") == b"first"

    def test_an_empty_object_can_be_stored(self, storage: ObjectStore) -> None:
        storage.put("a", b"")
        with pytest.raises(AlreadyExists):
            storage.put("a", b"")

    def test_an_object_can_be_put_again_after_a_delete(self, storage: ObjectStore, peek: Peek) -> None:
        storage.put("a", b"1")
        storage.delete("a")
        storage.put("a", b"2")
        assert peek("a") == b"2"

    def test_the_caller_can_reuse_the_buffer_after_a_put(self, storage: ObjectStore, peek: Peek) -> None:
        with AlignedBuffer(2 * MIB) as buffer:
            storage.put("a", buffer.view)
            buffer.view[:] = bytes([7]) * (2 * MIB)
        assert peek("a") == bytes(2 * MIB)

    def test_exactly_one_of_several_threads_creates_a_key(self, storage: ObjectStore, peek: Peek) -> None:
        start = threading.Barrier(8)

        def racer(number: int) -> bool:
            start.wait()
            return _race(storage, "commits/1", number)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(racer, range(8)))
        assert won.count(True) == 1
        assert peek("commits/1") == noise(2 * MIB + 5, won.index(True))

    def test_threads_can_put_into_a_new_folder_concurrently(self, storage: ObjectStore, peek: Peek) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: storage.put(f"objects/new/{n}", b"%d" % n, settle=False), range(64)))
        storage.settle("objects/new")
        assert [peek(f"objects/new/{n}") for n in range(64)] == [b"%d" % n for n in range(64)]

    def test_getting_a_missing_object_raises_not_found(self, storage: ObjectStore) -> None:
        storage.put("objects/x/a", b"")
        for key in ("no", "objects/x/b", "objects/y/a"):
            assert storage.size(key) is None
            with pytest.raises(NotFound, match=key):
                storage.get(key, limit=10)
            with pytest.raises(NotFound, match=key), storage.open(key) as reader:
                reader.read_into(0, [memoryview(bytearray(1))])

    def test_get_rejects_an_object_that_is_larger_than_the_limit(self, storage: ObjectStore) -> None:
        storage.put("a", b"12345")
        assert storage.get("a", limit=5) == b"12345"
        with pytest.raises(Refused, match="5 bytes"):
            storage.get("a", limit=4)

    def test_ranges_of_an_object_are_read(self, storage: ObjectStore) -> None:
        data = noise(3 * MIB + 3)
        storage.put("a", data)
        with storage.open("a") as reader:
            assert reader.size == len(data)
            for offset, sizes in [(0, [len(data)]), (4097, [1, 0, MIB, 5]), (len(data) - 2, [1, 1]), (9, []), (5, [0])]:
                buffers = [bytearray(size) for size in sizes]
                reader.read_into(offset, [memoryview(buffer) for buffer in buffers])
                assert b"".join(buffers) == data[offset : offset + sum(sizes)]

    def test_read_into_fills_only_the_given_slices(self, storage: ObjectStore) -> None:
        storage.put("a", b"abcdef")
        target = bytearray(b"-" * 10)
        view = memoryview(target)
        with storage.open("a") as reader:
            reader.read_into(1, [view[8:9], view[2:4]])
        assert target == b"--cd----b-"

    def test_read_into_accepts_a_large_number_of_buffers(self, storage: ObjectStore) -> None:
        data = noise(2 * 2500)
        storage.put("a", data)
        target = bytearray(len(data))
        view = memoryview(target)
        with storage.open("a") as reader:
            reader.read_into(0, [view[at : at + 2] for at in range(0, len(data), 2)])
        assert target == data

    @pytest.mark.parametrize(("offset", "size"), [(0, 11), (10, 1), (500, 1), (5, 6)])
    def test_reads_past_the_end_raise_an_error(self, storage: ObjectStore, offset: int, size: int) -> None:
        storage.put("a", bytes(10))
        with storage.open("a") as reader, pytest.raises(ShortObject) as caught:
            reader.read_into(offset, [memoryview(bytearray(size))])
        assert (caught.value.key, caught.value.size) == ("a", 10)

    def test_a_reader_can_be_used_by_many_threads(self, storage: ObjectStore) -> None:
        data = noise(MIB)
        storage.put("a", data)

        def part(number: int) -> bytes:
            buffer = bytearray(10_000)
            reader.read_into(number * 10_000, [memoryview(buffer)])
            return bytes(buffer)

        with storage.open("a") as reader, ThreadPoolExecutor(8) as pool:
            assert b"".join(pool.map(part, range(100))) == data[:1_000_000]

    def test_objects_with_a_prefix_are_listed(self, storage: ObjectStore) -> None:
        keys = ["casckpt.json", "commits/1", "commits/1.1", "damaged/u/h/0", "objects/x/a", "objects/xy/a", "tags/t/0"]
        for size, key in enumerate(keys):
            storage.put(key, bytes(size))

        def listed(prefix: str) -> list[str]:
            found = list(storage.list(prefix))
            assert all(entry.size == keys.index(entry.key) for entry in found)
            return sorted(entry.key for entry in found)

        assert listed("") == keys
        assert listed("commits/") == ["commits/1", "commits/1.1"]
        assert listed("objects/") == ["objects/x/a", "objects/xy/a"]
        assert listed("objects/x/") == ["objects/x/a"]
        assert listed("objects/x") == ["objects/x/a", "objects/xy/a"]
        assert listed("damaged/") == ["damaged/u/h/0"]
        assert listed("c") == ["casckpt.json", "commits/1", "commits/1.1"]
        assert listed("transactions/") == listed("objects/z/") == []

    def test_changed_content_is_listed_with_a_different_version(self, storage: ObjectStore) -> None:
        storage.put("tags/t/0", b"a@2")
        seen = [entry.version for entry in [*storage.list("tags/"), *storage.list("tags/")]]
        storage.delete("tags/t/0")
        storage.put("tags/t/0", b"a@3")
        seen += [entry.version for entry in storage.list("tags/")]
        assert seen[0] == seen[1] != seen[2]

    def test_a_listing_of_a_folder_contains_only_its_direct_children(self, storage: ObjectStore) -> None:
        keys = [
            "casckpt.json",
            "commits/1",
            "commits/1.1",
            "objects/note",
            "objects/x/a",
            "objects/xy/a",
            "objects/xy/b",
        ]
        for size, key in enumerate(keys):
            storage.put(key, bytes(size))

        def listed(folder: str) -> tuple[list[str], list[str]]:
            entries, folders = storage.list_folder(folder)
            assert all(entry.size == keys.index(entry.key) for entry in entries)
            return sorted(entry.key for entry in entries), sorted(folders)

        assert listed("objects") == (["objects/note"], ["objects/x", "objects/xy"])
        assert listed("objects/xy") == (["objects/xy/a", "objects/xy/b"], [])
        assert listed("commits") == (["commits/1", "commits/1.1"], [])
        assert listed("transactions") == listed("objects/z") == listed("obj") == ([], [])

    def test_a_listing_of_a_missing_prefix_is_empty(self, storage: ObjectStore) -> None:
        assert list(storage.list("")) == []

    def test_objects_can_be_deleted_during_a_listing(self, storage: ObjectStore) -> None:
        for number in range(20):
            storage.put(f"commits/{number}", b"")
        seen = set()
        for entry in storage.list("commits/"):
            storage.delete(entry.key)
            seen.add(entry.key)
        assert len(seen) == 20
        assert list(storage.list("")) == []

    def test_delete_is_idempotent(self, storage: ObjectStore, peek: Peek) -> None:
        storage.put("objects/x/a", b"1")
        for _ in range(2):
            storage.delete("objects/x/a")
            assert peek("objects/x/a") is None
            assert storage.size("objects/x/a") is None
        storage.delete("never/was")

    def test_an_open_reader_does_not_mix_two_objects(self, storage: ObjectStore) -> None:
        """After a delete, the reader returns the old bytes or fails. It never reads a later object."""
        storage.put("a", b"old")
        buffer = bytearray(3)
        with storage.open("a") as reader:
            reader.read_into(0, [memoryview(buffer)])
            storage.delete("a")
            storage.put("a", b"new")
            try:
                reader.read_into(0, [memoryview(buffer)])
            except (NotFound, StorageError):
                return
        assert buffer == b"old"

    @pytest.mark.parametrize("size", [0, 3, 2 * MIB + 1])
    def test_replace_overwrites_an_object(self, storage: ObjectStore, peek: Peek, size: int) -> None:
        storage.put("objects/x/a", b"damaged")
        for key in ("objects/x/a", "objects/y/a"):
            storage.replace(key, noise(size))
            assert peek(key) == noise(size)

    def test_settle_accepts_a_missing_folder(self, storage: ObjectStore) -> None:
        storage.settle("objects/none")
        assert list(storage.list("")) == []

    def test_sweep_does_not_delete_objects(self, storage: ObjectStore, peek: Peek) -> None:
        storage.put("objects/x/a", b"1")
        assert storage.sweep("objects/x") == 0
        assert peek("objects/x/a") == b"1"
        storage.delete("objects/x/a")
        assert storage.sweep("objects/x") == storage.sweep("objects/x") == storage.sweep("") == 0
        storage.put("objects/x/a", b"2")
        assert peek("objects/x/a") == b"2"

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", ".a", "a/.b", "a\0b"])
    def test_invalid_keys_are_rejected(self, storage: ObjectStore, key: str) -> None:
        for act in (
            lambda: storage.put(key, b""),
            lambda: storage.get(key, limit=1),
            lambda: storage.open(key).__enter__(),
            lambda: storage.size(key),
            lambda: storage.delete(key),
            lambda: storage.replace(key, b""),
        ):
            with pytest.raises(Refused, match="key"):
                act()
        assert list(storage.list("")) == []

    def test_storage_can_be_pickled_within_a_process(self, storage: ObjectStore) -> None:
        storage.put("a", b"1")
        copy = pickle.loads(pickle.dumps(storage))
        assert copy.url == storage.url
        assert copy.get("a", limit=1) == b"1"
        copy.put("b", b"2")
        assert storage.get("b", limit=1) == b"2"


class SharedContract(StorageContract):
    """The guarantees across processes."""

    racers = 4

    def test_exactly_one_of_several_processes_creates_a_key(self, storage: ObjectStore, peek: Peek) -> None:
        context = afresh()
        start = context.Barrier(self.racers)
        answers: SimpleQueue[tuple[int, bool]] = context.SimpleQueue()
        given = [(storage, number, start, answers) for number in range(self.racers)]
        racers = [context.Process(target=_race_process, args=args) for args in given]
        for racer in racers:
            racer.start()
        won = [number for number, first in (answers.get() for _ in racers) if first]
        for racer in racers:
            racer.join()
        assert len(won) == 1
        assert peek("commits/1") == noise(2 * MIB + 5, won[0])
