"""Reads of files in a local store, through the page cache or around it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from casckpt.errors import StorageError
from casckpt.storage.base import ShortObject
from casckpt.storage.local import reader as localreader
from casckpt.storage.local.reader import headroom
from casckpt.storage.local.store import _MOUNTS, LocalStore, _mount_of
from casckpt.storage.local.syscalls import Lacking, cached_pages
from tests.storage.contract import noise
from tests.support.local import KEY, failing


def test_a_short_read_is_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    data = noise(100)
    store.put(KEY, data)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:7]], at))
    target = bytearray(60)
    with store.open(KEY) as reader:
        reader.read_into(20, [memoryview(target)[:33], memoryview(target)[33:]])
    assert target == data[20:80]
    assert store.get(KEY, limit=100) == data


def test_a_file_truncated_while_open_is_reported(store: LocalStore) -> None:
    store.put(KEY, bytes(100))
    with store.open(KEY) as reader:
        os.truncate(store.path / KEY, 10)
        with pytest.raises(ShortObject) as caught:
            reader.read_into(0, [memoryview(bytearray(100))])
    assert caught.value.size == 10


def test_a_disk_error_during_a_read_is_reported(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, b"1")
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO))
    with store.open(KEY) as reader:
        with pytest.raises(StorageError, match="casckpt verify"):
            reader.read_into(0, [memoryview(bytearray(1))])
        reader.read_into(0, [memoryview(bytearray(1))])


def test_a_file_that_was_read_may_fail_to_close(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, b"1")
    with store.open(KEY) as reader:
        monkeypatch.setattr(os, "close", failing(os.close, errno.EINTR))
        reader.read_into(0, [memoryview(target := bytearray(1))])
    assert target == b"1"


def test_a_file_that_cannot_be_looked_up_is_reported(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, b"1")

    def use() -> tuple[bytes, str]:
        with store.open(KEY) as reader:
            return store.get(KEY, limit=1), reader.version

    data, version = use()
    outcomes = set()
    for number in range(9):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", failing(os.fstat, errno.ESTALE, after=number))
            try:
                outcomes.add(use() == (data, version))
            except StorageError as error:
                assert f"{KEY}: the network file system lost the file" in str(error)  # noqa: PT017 - not each call fails
                outcomes.add(False)
    assert outcomes == {True, False}


def test_uncached_ranges_are_read_with_direct_io(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom((9 << 20) + 17)
    store.put("a", data)
    for cached in (False, True):
        monkeypatch.setattr(localreader, "is_cached", lambda *_, answer=cached: answer)
        with store.open("a") as reader:
            for offset, nbytes in (
                (0, len(data)),
                (1, len(data) - 1),
                (4097, 8 << 20),
                (len(data) - (1 << 20), 1 << 20),
            ):
                first, second = bytearray(nbytes // 3), bytearray(nbytes - nbytes // 3)
                reader.read_into(offset, [memoryview(first), memoryview(second)])
                assert bytes(first + second) == data[offset : offset + nbytes]
            with pytest.raises(ShortObject):
                reader.read_into(10, [memoryview(bytearray(len(data)))])


@pytest.mark.parametrize("after", [0, 2])
def test_a_file_system_with_a_different_alignment_is_read_through_the_page_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    data = os.urandom((9 << 20) + 17)
    store.put("a", data)
    monkeypatch.setattr(localreader, "is_cached", lambda *_: False)
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EINVAL, after=after))
    target = bytearray(len(data) - 1)
    with store.open("a") as reader:
        reader.read_into(1, [memoryview(target)[:5], memoryview(target)[5:]])
    assert target == data[1:]


def test_ranges_shared_across_processes_are_read_through_the_page_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", bytes(2 << 20))
    asked: list[int] = []

    def is_cached(fd: int, offset: int, nbytes: int) -> bool:
        asked.append(nbytes)
        return False

    monkeypatch.setattr(localreader, "is_cached", is_cached)
    for shared in (True, False):
        with store.open("a", shared=shared) as reader:
            reader.read_into(0, [memoryview(bytearray(2 << 20))])
    assert asked == [2 << 20]


def test_reads_through_the_page_cache_start_with_small_ranges(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the kernel would read the first few MiB of each file in single pages."""
    data = noise(2 << 20)
    store.put("a", data)
    asked: list[tuple[int, int]] = []
    pread, preadv = os.pread, os.preadv

    def small(fd: int, nbytes: int, at: int) -> bytes:
        asked.append((nbytes, at))
        return pread(fd, nbytes, at)

    def large(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        asked.append((sum(buffer.nbytes for buffer in buffers), at))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "pread", small)
    monkeypatch.setattr(os, "preadv", large)
    target = bytearray(1 << 20)
    with store.open("a", shared=True) as reader:
        for offset in (4096, 8192):
            reader.read_into(offset, [memoryview(target)])
            assert target == data[offset : offset + (1 << 20)]
    assert asked == [(64 << 10, 0), (1 << 20, 4096), (1 << 20, 8192)]


def test_an_unreadable_start_does_not_affect_other_ranges(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(1 << 20)
    store.put("a", data)
    monkeypatch.setattr(os, "pread", failing(os.pread, errno.EIO))
    target = bytearray(4096)
    with store.open("a", shared=True) as reader:
        reader.read_into(512 << 10, [memoryview(target)])
    assert target == data[512 << 10 :][:4096]


def test_cachestat_and_mincore_report_the_same_cached_pages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    on_overlay = _mount_of(tmp_path, _MOUNTS)[0] == "overlay"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        for _ in range(2):
            told = localreader._is_resident(file.fileno(), 0, 1 << 20)
            with suppress(Lacking):  # older kernels require a different call
                assert (cached_pages(file.fileno(), 0, 1 << 20) >= 192) == (told and not on_overlay)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("answer", ["none", "no pages, as on an overlay"])
def test_mincore_is_used_if_cachestat_does_not_answer(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_answer(fd: int, start: int, nbytes: int) -> int:
        if answer == "none":
            raise Lacking
        return 0

    monkeypatch.setattr(localreader, "cached_pages", without_answer)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        assert localreader.is_cached(file.fileno(), 0, 1 << 20)
        assert localreader.is_cached(file.fileno(), 5000, 1 << 19)


def test_pages_that_were_just_written_count_as_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        assert localreader.is_cached(file.fileno(), 0, 1 << 20)
        assert localreader.is_cached(file.fileno(), 5000, 100)
        assert localreader.is_cached(file.fileno(), 0, 0)


KIB = 1 << 10


class Host:
    """The files in which a kernel reports its memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tell("meminfo", "MemTotal: 900 kB\nMemAvailable:     500 kB\n")
        self.tell("mine", "0::/\n")

    def tell(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def limit(self, folder: str, most: str, used: int, file: int, active: int = 0) -> None:
        self.tell(f"groups/{folder}/memory.max", f"{most}\n")
        self.tell(f"groups/{folder}/memory.current", f"{used}\n")
        self.tell(f"groups/{folder}/memory.stat", f"anon 5\ninactive_file {file}\nactive_file {active}\n")

    def found(self) -> int | None:
        return headroom(self.root / "meminfo", self.root / "mine", self.root / "groups")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_available_memory_of_the_host_is_found(host: Host) -> None:
    assert host.found() == 500 * KIB


def test_the_nearest_cgroup_limit_applies_and_reclaimable_memory_counts_as_available(host: Host) -> None:
    host.tell("mine", "0::/slice/job\n")
    host.limit("slice", str(300 * KIB), 200 * KIB, 20 * KIB, 30 * KIB)
    host.limit("slice/job", "max", 100 * KIB, 0)
    assert host.found() == 150 * KIB
    host.limit("slice/job", str(120 * KIB), 100 * KIB, 0)
    assert host.found() == 20 * KIB
    host.limit("slice/job", str(90 * KIB), 100 * KIB, 0)
    assert host.found() == 0


def test_a_container_with_its_own_cgroup_root_is_supported(host: Host) -> None:
    host.tell("mine", "0::/docker/0123\n")
    host.limit("", str(64 * KIB), 32 * KIB, 0)
    assert host.found() == 32 * KIB


def test_cgroup_v1_limits_are_found(host: Host) -> None:
    host.tell("mine", "9:cpu,cpuacct:/a\n4:memory:/job\n0::/\n")
    host.tell("groups/memory/job/memory.limit_in_bytes", "102400\n")
    host.tell("groups/memory/job/memory.usage_in_bytes", "92160\n")
    host.tell("groups/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 1024\ntotal_active_file 1024\n")
    host.tell("groups/memory/memory.limit_in_bytes", "9223372036854771712\n")
    host.tell("groups/memory/memory.usage_in_bytes", "92160\n")
    host.tell("groups/memory/memory.stat", "total_inactive_file 0\n")
    assert host.found() == 12 * KIB


@pytest.mark.parametrize("text", ["", "MemTotal: 900 kB\n"])
def test_a_system_without_memory_information_counts_as_having_no_limit(host: Host, text: str) -> None:
    host.tell("meminfo", text)
    assert host.found() is None
    (host.root / "meminfo").unlink()
    assert host.found() is None


def test_an_unreadable_memory_limit_counts_as_unknown(host: Host) -> None:
    host.limit("", "5", 5, 5)
    host.tell("groups/memory.stat", "anon 5\n")
    assert host.found() is None
