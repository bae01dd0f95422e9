"""The blob cache has a limited size, never returns wrong bytes, supports concurrent users, and never makes a load
fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from casckpt.base.progress import silent
from casckpt.contents import blobs
from casckpt.errors import InvalidInput, StorageError
from casckpt.format.blob import DATA_OFFSET, most_data
from casckpt.format.digest import cell_digest
from casckpt.format.keys import blob_key
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository import blob_cache as module
from casckpt.repository.blob_cache import FOLDER, BlobCache
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from tests.support.afresh import afresh
from tests.support.checkpoints import blob_of, is_blob
from tests.support.far import FarStore, far
from tests.support.repositories import repository

SIZE = 3 * 4096


UPLOADER = TxId(f"20240101T000000000000Z-{'1' * 16}-{'2' * 16}-3")


@pytest.fixture
def storage() -> FarStore:
    return far()


@pytest.fixture
def repo(tmp_path: Path, storage: FarStore) -> Repository:
    return repository(tmp_path, storage)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "blobs of this host"


def put(repo: Repository, seed: int) -> BlobRef:
    """Put a real blob."""
    cell = bytes([seed]) * most_data(SIZE)
    name, data, _ = blob_of({cell_digest(cell): ("uint8", cell)})
    ref = BlobRef(name, SIZE, UPLOADER)
    blobs.put(repo, ref.uploader, ref.hash, data)
    return ref


def names(root: Path) -> set[str]:
    return {path.name for path in (root / FOLDER).iterdir()}


def use_at(root: Path, ref: BlobRef, second: int) -> None:
    os.utime(root / FOLDER / ref.hash, (second, second))


def test_a_blob_is_fetched_once_and_then_read_from_the_cache(repo: Repository, storage: FarStore, root: Path) -> None:
    cache, ref = BlobCache(root), put(repo, 1)
    assert cache.open(ref) is None
    assert cache.keep(storage, ref)
    assert cache.keep(storage, ref)
    assert storage.count("open") == 1
    with cache.open(ref) or pytest.fail("it is not there") as reader:
        part = bytearray(10)
        reader.read_into(DATA_OFFSET, [memoryview(part)])
    assert part == bytes([1]) * 10


def test_least_recently_used_blobs_are_evicted_first(repo: Repository, storage: FarStore, root: Path) -> None:
    cache = BlobCache(root, limit=3 * SIZE)
    refs = [put(repo, seed) for seed in range(4)]
    for second, ref in enumerate(refs[:3]):
        cache.keep(storage, ref)
        use_at(root, ref, 1000 + second)
    reader = cache.open(refs[0])  # used just now
    assert cache.keep(storage, refs[3])
    assert names(root) == {ref.hash for ref in (refs[0], refs[2], refs[3])}
    cache.fill(storage, [refs[1], refs[2]], 2, silent)
    assert reader is not None
    with reader:  # an open reader remains readable after its file is removed
        reader.read_into(0, [memoryview(bytearray(SIZE))])


def test_saves_add_blobs_and_keep_those_that_they_reuse(repo: Repository, root: Path) -> None:
    cache, refs = BlobCache(root, limit=3 * SIZE, in_memory=True), [put(repo, seed) for seed in range(4)]
    data = {ref: repo.storage.get(blob_key(ref.uploader, ref.hash), limit=SIZE) for ref in refs}
    for second, ref in enumerate(refs[:3]):
        cache.add(ref, memoryview(data[ref]))
        use_at(root, ref, 1000 + second)
    cache.touch(refs[0])
    cache.add(refs[3], memoryview(data[refs[3]]))
    cache.add(refs[3], memoryview(data[refs[3]]))
    assert names(root) == {ref.hash for ref in (refs[0], refs[2], refs[3])}
    assert cache.contents == (3, 3 * SIZE)
    root.chmod(0o755)
    assert cache.open(refs[3]) is None
    root.chmod(0o700)
    assert cache.open(refs[3]) is not None
    BlobCache(root, limit=SIZE - 1, in_memory=True).add(refs[1], memoryview(data[refs[1]]))
    assert cache.clear() == (3, 3 * SIZE)
    assert names(root) == set()


def test_a_download_into_memory_creates_a_folder_that_only_this_user_can_access(
    repo: Repository, storage: FarStore, root: Path
) -> None:
    cache, ref = BlobCache(root, in_memory=True), put(repo, 1)
    assert cache.fill(storage, [ref], 1, silent) == SIZE
    assert cache.open(ref) is not None
    assert root.stat().st_mode & 0o777 == 0o700


def test_clearing_the_cache_does_not_follow_a_link_that_another_user_created(root: Path, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
    (mine / "file").write_text("mine")
    (theirs / FOLDER).symlink_to(mine)
    root.symlink_to(theirs)
    assert BlobCache(root, in_memory=True).clear() == (0, 0)
    assert (mine / "file").exists()


def test_a_cache_that_cannot_be_written_never_fails_a_save(
    repo: Repository, unusable: BlobCache, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(2):
        unusable.add(put(repo, seed), memoryview(bytes(SIZE)))
    assert len([record for record in caplog.records if "no longer adds blobs" in record.message]) == 1


def test_a_cache_in_memory_uses_at_most_half_of_the_available_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "headroom", lambda: 1000)
    assert BlobCache(root, in_memory=True).room() == 500
    assert BlobCache(root, 600, in_memory=True).room() == 500
    assert BlobCache(root, 400, in_memory=True).room() == 400
    assert BlobCache(root).room() > 500


def test_the_cache_never_exceeds_its_limit(repo: Repository, storage: FarStore, root: Path) -> None:
    cache = BlobCache(root, limit=5 * SIZE + 10)
    refs = [put(repo, seed) for seed in range(20)]
    for ref in refs:
        cache.keep(storage, ref)
        assert sum(path.stat().st_size for path in (root / FOLDER).iterdir()) <= 5 * SIZE + 10
    with pytest.raises(InvalidInput, match="can hold only 61450"):
        cache.fill(storage, refs, 2, silent)
    assert not BlobCache(root, limit=SIZE - 1).keep(storage, put(repo, 30))
    assert not BlobCache(root, limit=0).keep(storage, put(repo, 31))
    for limit in (-1, 1.5):
        with pytest.raises(InvalidInput, match="a cache size of"):
            BlobCache(root, limit=limit)  # type: ignore[arg-type]  # a wrong type on purpose


def test_a_cache_without_a_limit_leaves_half_of_the_disk_free(
    repo: Repository, storage: FarStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, refs = BlobCache(root), [put(repo, seed) for seed in range(4)]
    room = [6 * SIZE]

    def statvfs(path: object) -> os.statvfs_result:
        held = len(names(root)) if (root / FOLDER).exists() else 0
        return os.statvfs_result((1, 1, 0, 0, room[0] - held * SIZE, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    for ref in refs:
        assert cache.keep(storage, ref)
    assert len(names(root)) == 3


def test_a_cached_blob_with_the_wrong_size_is_dropped(repo: Repository, storage: FarStore, root: Path) -> None:
    cache, ref = BlobCache(root), put(repo, 1)
    cache.keep(storage, ref)
    path = root / FOLDER / ref.hash
    path.chmod(0o644)
    path.write_bytes(b"torn")
    assert cache.open(ref) is None
    assert not path.exists()
    assert cache.keep(storage, ref)
    assert path.stat().st_size == SIZE


def test_a_symlink_in_the_cache_is_not_followed(repo: Repository, storage: FarStore, root: Path) -> None:
    cache, ref = BlobCache(root), put(repo, 1)
    (root / FOLDER).mkdir(parents=True)
    (root / "elsewhere").write_bytes(bytes(SIZE))
    (root / FOLDER / ref.hash).symlink_to(root / "elsewhere")
    assert cache.open(ref) is None


@pytest.fixture(params=["a file in its place", "a full disk", "no rights"])
def unusable(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> BlobCache:
    """A cache folder that is not writable."""
    cache = BlobCache(root)
    if request.param == "a file in its place":
        root.write_text("no folder")
    else:
        root.mkdir()

        def fail(*_: object, **__: object) -> None:
            raise StorageError("the disk is full" if request.param == "a full disk" else "permission denied")

        monkeypatch.setattr(LocalStore, "put", fail)
    return cache


def test_an_unwritable_cache_is_not_used(
    repo: Repository, storage: FarStore, unusable: BlobCache, caplog: pytest.LogCaptureFixture
) -> None:
    refs = [put(repo, seed) for seed in range(3)]
    assert [unusable.keep(storage, ref) for ref in refs] == [False] * 3
    assert storage.count("open") <= 1  # it tries once
    assert len([record for record in caplog.records if "no longer adds blobs" in record.message]) == 1
    with pytest.raises(StorageError, match="different cache_dir"):
        unusable.fill(storage, refs, 2, silent)


def test_an_unreadable_cache_is_not_used(repo: Repository, tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / ("x" * 300))  # an operating system error, as for another user's folder
    assert cache.open(put(repo, 0)) is None
    assert not cache.is_there


def _work(root: Path, folder: Path, seed: int) -> None:
    storage = LocalStore(folder)
    refs = [
        BlobRef(BlobHash(entry.key.split("/")[2].split(".")[0]), entry.size, UPLOADER)
        for entry in storage.list("objects/")
    ]
    cache = BlobCache(root, limit=4 * SIZE)
    for turn in range(40):
        ref = refs[(turn * seed) % len(refs)]
        cache.keep(storage, ref)
        reader = cache.open(ref)
        if reader is not None:
            with reader:
                data = bytearray(SIZE)
                reader.read_into(0, [memoryview(data)])
                assert is_blob(ref.hash, data)


def test_processes_can_fill_and_evict_concurrently(tmp_path: Path, root: Path) -> None:
    folder = tmp_path / "store"
    repo = repository(tmp_path, LocalStore(folder))
    for seed in range(9):
        put(repo, seed)
    context = afresh()
    workers = [context.Process(target=_work, args=(root, folder, seed)) for seed in (1, 2, 4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sum(path.stat().st_size for path in (root / FOLDER).iterdir()) <= (4 + 2) * SIZE
    BlobCache(root, limit=4 * SIZE).keep(LocalStore(folder), put(repo, 10))
    assert len(names(root)) <= 4


def test_threads_that_need_the_same_blob_fetch_it_once(repo: Repository, storage: FarStore, root: Path) -> None:
    cache, ref = BlobCache(root), put(repo, 1)
    assert cache.fill(storage, [ref] * 20, 8, silent) == SIZE
    assert storage.count("open") == 1
