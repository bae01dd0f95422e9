"""The ranks of a host read shared bytes once. No damage to the shared files makes a read fail or return wrong
bytes."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from casckpt.errors import NotFound, StorageError
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository import host_reads as module
from casckpt.repository.blob_cache import PARTS, BlobCache, Unusable
from casckpt.repository.host_reads import HostReads
from casckpt.storage.base import BLOCK, Reader
from tests.support.forks import forked
from tests.support.tally import tally

SIZE = 40 * BLOCK + 100
DATA = random.Random(1).randbytes(SIZE)
REF = BlobRef(BlobHash("a" * 64), SIZE, TxId(f"20240101T000000000000Z-{'1' * 16}-{'2' * 16}-3"))
EVERYTHING = [(0, 0, SIZE)]


class Source:
    """The blob in the store, which records the ranges that are read."""

    size = SIZE

    def __init__(self, data: bytes = DATA, before: Callable[[], object] = bool) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._data, self._before = data, before

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.ranges.append((offset, offset + sum(map(len, buffers))))
        self._before()
        for buffer in buffers:
            buffer[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "memory"


Begin = Callable[..., HostReads]


@pytest.fixture
def begin(root: Path) -> Begin:
    def begun(
        rank: int = 0,
        ranges: Sequence[tuple[int, int, int]] = EVERYTHING,
        *,
        sharing: int = 2,
        load: str = "load",
        alive: Callable[[], object] | None = None,
        patience: float = 60.0,
    ) -> HostReads:
        """Begin the reads of a rank. ``alive``: rank 0 of this host brings blob 0, which rank 7 reads."""
        reads = HostReads(BlobCache(root, in_memory=True), load, f"{load}-{rank}", sharing, patience)
        if alive is not None:
            reads.expect({0: (0, 7)}, sharing, alive)
        assert reads.begin(ranges)
        return reads

    return begun


def read(reader: Reader, start: int = 0, stop: int = SIZE) -> bytes:
    """Read into several buffers."""
    data = memoryview(bytearray(stop - start))
    middle = len(data) // 3
    reader.read_into(start, [data[:middle], data[middle:]])
    return bytes(data)


def part(root: Path, load: str = "load") -> Path:
    return root / PARTS / load / "0"


def test_a_second_rank_reuses_what_the_first_rank_has_read(begin: Begin) -> None:
    source = Source()
    for rank in (0, 1):
        reader = begin(rank).reader(0, REF, source)
        assert reader.size == SIZE
        assert read(reader, 5000, 9000) == DATA[5000:9000]
        assert read(reader) == DATA
    assert source.ranges == [(BLOCK, 3 * BLOCK), (0, BLOCK), (3 * BLOCK, SIZE)]


def test_bytes_that_no_other_rank_needs_are_not_written_to_memory(begin: Begin, root: Path) -> None:
    first, second = begin(0, [(0, 0, 3 * BLOCK)]), begin(1, [(0, 2 * BLOCK, BLOCK), (1, 0, SIZE)])
    source = Source()
    assert read(first.reader(0, REF, source), 0, 2 * BLOCK) == DATA[: 2 * BLOCK]
    assert not part(root).exists()
    assert read(second.reader(0, REF, source), 2 * BLOCK, 3 * BLOCK) == DATA[2 * BLOCK : 3 * BLOCK]
    assert read(first.reader(0, REF, source), 2 * BLOCK, 3 * BLOCK) == DATA[2 * BLOCK : 3 * BLOCK]
    assert source.ranges == [(0, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK)]


def test_bytes_are_shared_until_all_ranks_have_announced_what_they_need(begin: Begin) -> None:
    source = Source()
    first = begin(0, sharing=3)
    begin(1, [(7, 0, 1)], sharing=3)
    read(first.reader(0, REF, source))
    assert read(begin(2, sharing=3).reader(0, REF, source)) == DATA
    assert len(source.ranges) == 1


def test_the_last_rank_removes_the_shared_bytes(begin: Begin, root: Path) -> None:
    ranks = [begin(rank) for rank in (0, 1)]
    read(ranks[0].reader(0, REF, Source()))
    ranks[0].end()
    ranks[0].end()
    assert part(root).exists()
    ranks[1].end()
    assert list((root / PARTS).iterdir()) == []


def give_up(reads: HostReads) -> None:
    with reads.cache.tried():
        raise Unusable("a test")


def shrink(reads: HostReads) -> None:
    reads.cache = BlobCache(reads.cache.root, SIZE - 1, in_memory=True)


@pytest.mark.parametrize("harm", [give_up, shrink])
def test_ranks_do_not_keep_bytes_in_memory_for_a_rank_that_reads_alone(
    begin: Begin, root: Path, harm: Callable[[HostReads], object]
) -> None:
    first, second = begin(0), HostReads(BlobCache(root, in_memory=True), "load", "load-1", 2)
    harm(second)
    assert not second.begin(EVERYTHING)
    assert read(first.reader(0, REF, Source())) == DATA
    assert not part(root).exists()
    first.end()
    second.end()
    assert list((root / PARTS).iterdir()) == []


def test_the_shared_bytes_are_removed_if_a_rank_needs_none(begin: Begin, root: Path) -> None:
    first, second = begin(0), HostReads(BlobCache(root, in_memory=True), "load", "load-1", 2)
    read(first.reader(0, REF, Source()))
    first.end()
    second.end()
    assert list((root / PARTS).iterdir()) == []


def test_a_rank_can_begin_to_read_while_another_job_removes_the_folder(
    begin: Begin, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, removals = module._write, iter([True])

    def remove_first(path: Path, ranges: Any) -> None:
        if next(removals, False):
            shutil.rmtree(path.parent)
        write(path, ranges)

    monkeypatch.setattr(module, "_write", remove_first)
    reads = begin(0)
    assert read(reads.reader(0, REF, Source())) == DATA
    assert part(root).exists()


def test_threads_of_several_ranks_read_each_block_once(begin: Begin) -> None:
    source, chance = Source(), random.Random(7)
    readers = [begin(rank, sharing=3).reader(0, REF, source) for rank in range(3)]
    starts = [chance.randrange(SIZE - 1) for _ in range(60)]
    ranges = [(start, chance.randrange(start + 1, SIZE)) for start in starts]

    def one(number: int) -> bool:
        start, stop = ranges[number % len(ranges)]
        return read(readers[number % 3], start, stop) == DATA[start:stop]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(180)))
    blocks = [block for start, stop in source.ranges for block in range(start // BLOCK, -(-stop // BLOCK))]
    assert len(blocks) == len(set(blocks))


# what may happen to the files


def truncate(path: Path) -> None:
    os.truncate(path, SIZE // 2)


def spoil_states(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\7\0\2\0\xff")


@pytest.mark.parametrize("harm", [Path.unlink, truncate, spoil_states, lambda path: path.chmod(0), Path.touch])
def test_damage_to_a_shared_file_causes_only_additional_reads(
    begin: Begin, root: Path, harm: Callable[[Path], object]
) -> None:
    ranks, source = [begin(rank) for rank in (0, 1)], Source()
    read(ranks[0].reader(0, REF, source), 0, 20 * BLOCK)
    harm(part(root))
    for rank in (1, 0, 1):
        assert read(ranks[rank].reader(0, REF, source)) == DATA


def spoil_wants(path: Path) -> None:
    for wants in path.parent.glob("*-wants"):
        wants.write_bytes(bytes(24))


@pytest.mark.parametrize("harm", [spoil_wants, lambda path: shutil.rmtree(path.parent)])
def test_damage_to_the_announcements_of_ranks_causes_only_additional_reads(
    begin: Begin, root: Path, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [begin(rank) for rank in (0, 1)]
    harm(part(root))
    for reads in ranks:
        assert read(reads.reader(0, REF, Source())) == DATA
        reads.end()
    assert not caplog.records


def test_a_blob_that_was_dropped_is_read_again(begin: Begin, root: Path) -> None:
    ranks, source = [begin(rank) for rank in (0, 1)], Source()
    read(ranks[0].reader(0, REF, Source(bytes(SIZE))))
    assert read(ranks[1].reader(0, REF, source)) == bytes(SIZE)
    ranks[1].drop(0)
    assert read(ranks[1].reader(0, REF, source)) == DATA


@pytest.mark.parametrize("error", [StorageError("no answer"), NotFound("it is gone")])
def test_an_error_of_the_store_is_raised_and_the_next_rank_tries_again(begin: Begin, error: Exception) -> None:
    def fail() -> None:
        raise error

    ranks = [begin(rank) for rank in (0, 1)]
    with pytest.raises(type(error), match=str(error)):
        read(ranks[0].reader(0, REF, Source(before=fail)))
    assert read(ranks[1].reader(0, REF, Source())) == DATA


def test_full_memory_is_logged_once_and_the_rank_then_reads_alone(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    reads, source = begin(), Source()
    monkeypatch.setattr(module, "write_all", full)
    reader = reads.reader(0, REF, source)
    for _ in range(3):
        assert read(reader) == DATA
    assert len([one for one in caplog.records if "No space left on device" in one.message]) == 1
    assert not reads.begin(EVERYTHING)


@pytest.mark.parametrize("harm", ["mode", "file", "symlink", "missing", "read-only"])
def test_a_folder_that_others_could_change_is_not_used(
    root: Path, tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if harm == "mode":
        root.mkdir()
        root.chmod(0o755)
    elif harm == "file":
        root.write_text("")
    elif harm == "symlink":
        (tmp_path / "theirs").mkdir(0o700)
        root.symlink_to(tmp_path / "theirs")
    elif harm == "missing":
        root /= "below"
    else:
        root.mkdir(0o700)

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(Path, "mkdir", refuse)
    reads = HostReads(BlobCache(root, in_memory=True), "load", "load-0", 2)
    assert not reads.begin(EVERYTHING)
    assert not reads.begin(EVERYTHING)
    reads.end()
    assert len(caplog.records) == 1
    assert str(root) in caplog.text


def test_a_folder_of_another_user_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    assert not HostReads(BlobCache(root, in_memory=True), "load", "load-0", 2).begin(EVERYTHING)


def test_ranks_do_not_share_bytes_if_memory_is_too_small(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = BlobCache(root, SIZE - 1, in_memory=True)
    assert not HostReads(cache, "load", "load-0", 2).begin(EVERYTHING)
    assert f"has room for only {SIZE - 1} bytes" in caplog.text
    assert HostReads(BlobCache(root, SIZE, in_memory=True), "load", "load-0", 2).begin(EVERYTHING)
    assert not HostReads(BlobCache(root, 0, in_memory=True), "load", "load-0", 2).begin(EVERYTHING)


def test_the_least_recently_written_blobs_are_removed_to_make_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_ROOM", 0)
    cache = BlobCache(root, 3 * SIZE, in_memory=True)
    reads = HostReads(cache, "load", "load-0", 2)
    assert reads.begin([(number, 0, SIZE) for number in range(9)])
    for number in range(9):
        assert read(reads.reader(number, REF, Source())) == DATA
        os.utime(root / PARTS / "load" / str(number), (1000 + number, 1000 + number))
        assert cache.contents[1] <= 3 * SIZE
    assert (root / PARTS / "load" / "8").exists()


def test_files_of_killed_jobs_are_removed_after_an_hour(begin: Begin, root: Path) -> None:
    for load, age in (("old", 3700), ("young", 3000)):
        read(begin(load=load).reader(0, REF, Source()))
        now = (root / PARTS / load).stat().st_mtime
        os.utime(root / PARTS / load, (now - age, now - age))
    begin(load="next")
    assert {path.name for path in (root / PARTS).iterdir()} == {"young", "next"}


# processes that die or stop


CALLS = ("open", "close", "mkdir", "pwrite", "pread", "preadv", "ftruncate", "fstat", "replace", "listdir", "unlink")


def run_and_die(step: int, job: Callable[[], object]) -> int:
    """Fork a child that runs ``job`` and kills itself before system call number ``step``. Return its status."""
    child = os.fork()
    if not child:
        steps = itertools.count(1)

        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapped

        for name in CALLS:
            setattr(os, name, wrap(getattr(os, name)))
        fcntl.fcntl = wrap(fcntl.fcntl)  # in this child only
        job()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_rank_killed_at_any_system_call_leaves_only_correct_bytes(begin: Begin, root: Path, full: bool) -> None:
    def job() -> None:
        reads = begin(0)
        read(reads.reader(0, REF, Source()), 3 * BLOCK, 9 * BLOCK)
        read(reads.reader(0, REF, Source()))
        reads.end()

    for step in itertools.count(1, 1 if full else 3):
        status = run_and_die(step, job)
        reads = begin(1)
        assert read(reads.reader(0, REF, Source())) == DATA
        reads.end()
        if step % 2:  # otherwise, the next one continues with these files
            for path in (root / PARTS / "load").glob("*"):
                path.unlink()
        if not status:
            break
        tally("SIGKILL at a system call")
    assert step > 20


@pytest.fixture
def holder(begin: Begin) -> Iterator[int]:
    """A process that has begun to read the blob for all ranks, and hangs."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:

        def hang() -> None:
            os.write(tell, b".")
            signal.pause()

        read(begin(0).reader(0, REF, Source(before=hang)))
    os.close(tell)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_process_does_not_block_other_ranks(begin: Begin, holder: int) -> None:
    source = Source()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(read, begin(1).reader(0, REF, source))
        assert not source.ranges
        os.kill(holder, signal.SIGKILL)
        assert waits.result(60) == DATA
    assert source.ranges == [(0, SIZE)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("holder")
def test_a_rank_does_not_wait_forever_for_a_stopped_process(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    reader = begin(1, patience=0.05).reader(0, REF, Source())
    assert read(reader) == DATA
    assert read(reader) == DATA
    assert "has been reading bytes of" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_forked_during_a_read_does_not_keep_the_lock(begin: Begin) -> None:
    children = []

    def fork() -> None:
        child = forked(bool)
        child.__enter__()
        children.append(child)

    read(begin(0).reader(0, REF, Source(before=fork)), 0, BLOCK)
    assert read(begin(1).reader(0, REF, Source())) == DATA
    children[0].__exit__(None, None, None)


# blobs that hosts pass to each other


@pytest.fixture
def pair(begin: Begin) -> tuple[HostReads, HostReads]:
    """Rank 0, which brings the blob from rank 7, and rank 1, which waits for it."""
    return begin(0, alive=bool), begin(1, alive=bool)


def test_a_rank_waits_until_the_bytes_that_it_needs_have_arrived(pair: tuple[HostReads, HostReads]) -> None:
    bringer, waiter = pair
    source, middle = Source(), 20 * BLOCK
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(read, waiter.reader(0, REF, source), 5, middle)  # before the gate exists
        with bringer.bringing():
            late = pool.submit(read, waiter.reader(0, REF, source))
            assert not early.done()
            bringer.put(0, SIZE, 0, memoryview(DATA)[:middle])
            assert early.result(60) == DATA[5:middle]
            assert not late.done()
            bringer.put(0, SIZE, middle, memoryview(DATA)[middle:])
            assert late.result(60) == DATA
    assert source.ranges == []


def test_a_rank_reads_from_the_store_what_is_released_without_bytes(pair: tuple[HostReads, HostReads]) -> None:
    bringer, waiter = pair
    source = Source()
    with bringer.bringing():
        bringer.put(0, SIZE, 0, memoryview(DATA)[:BLOCK])
        bringer.release(0, BLOCK, SIZE - BLOCK)
        assert read(waiter.reader(0, REF, source), 0, BLOCK) == DATA[:BLOCK]
        assert source.ranges == []
        assert read(waiter.reader(0, REF, source)) == DATA
    assert source.ranges == [(BLOCK, SIZE)]
    assert read(waiter.reader(0, REF, source)) == DATA
    assert len(source.ranges) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_bringer_does_not_block_others(pair: tuple[HostReads, HostReads]) -> None:
    bringer, waiter = pair
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        with bringer.bringing():
            os.write(tell, b".")
            signal.pause()
    assert os.read(ready, 1) == b"."
    source = Source()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(read, waiter.reader(0, REF, source))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert waits.result(60) == DATA
    assert source.ranges == [(0, SIZE)]
    for end in (ready, tell):
        os.close(end)


@pytest.mark.parametrize("begins", [False, True])
def test_a_rank_does_not_wait_forever_for_bytes_that_do_not_arrive(
    begin: Begin, begins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bringer, waiter = begin(0, alive=bool), begin(1, alive=bool, patience=0.05)
    with bringer.bringing() if begins else nullcontext():
        for _ in range(2):
            assert read(waiter.reader(0, REF, Source())) == DATA
    assert "rank 0 has not brought bytes of" in caplog.text
    assert len(caplog.records) == 1


def test_no_rank_waits_for_a_bringer_without_locks(
    pair: tuple[HostReads, HostReads], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bringer, waiter = pair
    with monkeypatch.context() as patched:
        patched.setattr(module, "_lock", fail)
        bringing = bringer.bringing()
        bringing.__enter__()
    assert read(waiter.reader(0, REF, Source())) == DATA
    bringing.__exit__(None, None, None)
    assert [record.message for record in caplog.records if "has not brought" in record.message] == []


def no_locks(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(module, "_lock", fail)


def no_names(patched: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patched.setattr(Path, "replace", refuse)


@pytest.mark.parametrize("harm", [lambda _: None, no_locks, no_names], ids=["right", "no locks", "no names"])
@pytest.mark.parametrize("fails", [False, True])
def test_gates_are_closed_after_the_reads(
    begin: Begin, root: Path, fails: bool, harm: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bringer, waiter = begin(0, alive=bool), begin(1, alive=bool, patience=0.05)

    def still_open() -> list[str]:
        links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        names = [os.readlink(link) for link in links if link.is_symlink()]
        return [name for name in names if name.startswith(str(root)) and "-gate" in name]

    with suppress(KeyError), ExitStack() as bringing:
        with monkeypatch.context() as patched:
            harm(patched)
            bringing.enter_context(bringer.bringing())
        bringer.put(0, SIZE, 0, memoryview(DATA))
        assert read(waiter.reader(0, REF, Source())) == DATA
        if fails:
            raise KeyError
    waiter.end()
    bringer.end()
    assert still_open() == []
    assert list((root / PARTS).iterdir()) == []


def test_a_child_forked_while_bytes_arrive_does_not_keep_others_waiting(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    bringer, waiter = begin(0, alive=bool), begin(1, alive=bool, patience=0.05)
    with ExitStack() as child:
        with bringer.bringing():
            child.enter_context(forked(bool))
        assert read(waiter.reader(0, REF, Source())) == DATA
    assert not caplog.records


def fail(*_: object) -> bool:
    raise Unusable("No locks available")


def test_a_rank_that_waits_is_alive_as_long_as_bytes_arrive(begin: Begin) -> None:
    signs = SimpleQueue[int]()
    bringer, waiter = begin(0, alive=bool), begin(1, alive=lambda: signs.put(1))
    with ThreadPoolExecutor(1) as pool, bringer.bringing():
        waits = pool.submit(read, waiter.reader(0, REF, Source()), SIZE - 1, SIZE)
        for block in range(3):
            assert signs.get(timeout=60)
            bringer.put(0, SIZE, block * BLOCK, memoryview(DATA)[block * BLOCK : (block + 1) * BLOCK])
        bringer.release(0, 0, 0)
        assert waits.result(60) == DATA[-1:]


def test_wrong_bytes_from_another_host_name_its_rank(
    pair: tuple[HostReads, HostReads], caplog: pytest.LogCaptureFixture
) -> None:
    pair[1].drop(0)
    pair[1].drop(1)
    assert [one.message for one in caplog.records] == [
        "bytes that rank 7 passed on are wrong; this rank reads them from the store"
    ]


def test_a_folder_that_another_job_removes_does_not_keep_ranks_waiting(
    pair: tuple[HostReads, HostReads], root: Path
) -> None:
    bringer, waiter = pair
    with bringer.bringing():
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(read, waiter.reader(0, REF, Source()), 0, BLOCK)
            bringer.put(0, SIZE, 0, memoryview(DATA)[:BLOCK])
            assert first.result(60) == DATA[:BLOCK]
        shutil.rmtree(part(root).parent)
        bringer.release(0, 0, 0)
        assert read(waiter.reader(0, REF, Source())) == DATA
