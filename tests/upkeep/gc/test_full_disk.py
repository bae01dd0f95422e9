"""A store on a full disk frees itself: on small file systems, and on storage that says that it is full."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from casckpt.errors import StorageError
from casckpt.plan.retention import Policy, Rotation
from casckpt.repository.repository import Repository
from casckpt.storage.memory import MemoryStore
from casckpt.upkeep.gc.forgetting import forget_chosen, rotate
from tests.support.faulty import FaultyStore
from tests.support.full_disks import check_scene
from tests.support.gcs import run_gc, steps
from tests.support.repositories import Ticks, memory, repository, save

SCENES = [
    *product(("gc", "forget"), ("no job", "open", "killed", "saving")),
    *product(["thin"], ("no job", "open", "killed")),  # a job that saves takes up what so few thinned checkpoints free
    ("save", "no job"),
]
QUICK = [("bytes", "gc", "open"), ("inodes", "gc", "killed"), ("bytes", "thin", "open")]


@pytest.mark.parametrize(
    ("kind", "lack", "scene", "job"),
    [
        pytest.param(kind, lack, *scene, marks=[] if kind == "tmpfs" and (lack, *scene) in QUICK else pytest.mark.soak)
        for kind, lack in [*product(("tmpfs", "ext4"), ("bytes", "inodes")), ("xfs", "bytes"), ("ext4", "quota")]
        for scene in SCENES
    ],
)
def test_commands_free_a_full_file_system(kind: str, lack: str, scene: str, job: str, disk_path: Path) -> None:
    check_scene("full_disks", kind, lack, scene, job, disk_path)


class FullDisk(FaultyStore):
    """Storage with room for ``free`` more objects, and for ``spares`` prepared ones, which each deletion refills."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.free, self.spares = 10**6, 0

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        if not self.free and self.inner.size(key) is None:
            raise StorageError(f"{key}: full", full=True)
        super().put(key, data, settle=settle)
        self.free -= 1

    def put_prepared(self, key: str, data: bytes) -> bool:
        if not self.spares:
            raise StorageError(f"{key}: full", full=True)
        self.spares -= 1
        self.inner.put(key, data)
        return True

    def prepare(self) -> int:
        made = min(64 - self.spares, self.free)
        self.spares, self.free = self.spares + made, self.free - made
        return self.spares

    def delete(self, key: str) -> None:
        self.free += self.inner.size(key) is not None
        super().delete(key)

    def bytes_free(self) -> int:
        return self.free << 12


@pytest.fixture
def disk() -> FullDisk:
    inner = memory()
    assert isinstance(inner, MemoryStore)
    return FullDisk(inner)


def full(tmp_path: Path, disk: FullDisk, *, saves: int, spares: int) -> Repository:
    repo = repository(tmp_path, disk, clock=Ticks())
    for step in range(saves):
        save(repo, step=step, texts=[f"{step}" * 10])
    disk.free, disk.spares = 0, spares
    return repo


def test_gc_works_in_parts_with_fewer_prepared_files_than_records(tmp_path: Path, disk: FullDisk) -> None:
    repo = full(tmp_path, disk, saves=60, spares=40)
    result = run_gc(repo, Policy(keep_last=2))
    assert steps(result.purged) == list(range(58))
    assert result.deleted_blobs == 58
    assert disk.spares
    assert steps(run_gc(repo, Policy()).purged) == []


def test_gc_continues_if_the_prepared_files_do_not_suffice_for_a_part(tmp_path: Path, disk: FullDisk) -> None:
    repo = full(tmp_path, disk, saves=20, spares=19)
    assert steps(run_gc(repo, Policy(keep_last=1)).purged) == list(range(19))


def test_gc_without_prepared_files_first_deletes_what_needs_no_record(tmp_path: Path, disk: FullDisk) -> None:
    repo = full(tmp_path, disk, saves=20, spares=0)
    disk.free = 10
    forget_chosen(repo, ["run@0", "run@1"], tagged=False, dry_run=False)
    rotate(repo, "run", Rotation(max_checkpoints=16))
    disk.free = disk.spares = 0
    assert len(run_gc(repo, Policy(keep_last=1)).purged) >= 15


def test_gc_that_cannot_put_a_single_record_says_so_and_removes_nothing(tmp_path: Path, disk: FullDisk) -> None:
    repo = full(tmp_path, disk, saves=3, spares=0)
    with pytest.raises(StorageError, match="full") as caught:
        run_gc(repo, Policy(keep_last=1))
    assert caught.value.full
    disk.free = 100
    assert steps(run_gc(repo, Policy()).purged) == []


def test_forget_and_rotation_free_what_needs_no_record_and_try_again(tmp_path: Path, disk: FullDisk) -> None:
    repo = full(tmp_path, disk, saves=10, spares=0)
    disk.free = 8
    rotate(repo, "run", Rotation(max_checkpoints=6))  # purges 4, whose objects nobody has deleted yet
    disk.free = 0
    assert steps(forget_chosen(repo, ["run@6", "run@7"], tagged=False, dry_run=False)) == [6, 7]


def test_gc_prepares_files_again_with_what_it_has_freed_last(tmp_path: Path, disk: FullDisk) -> None:
    repo = full(tmp_path, disk, saves=6, spares=30)
    assert len(run_gc(repo, Policy(keep_last=1)).purged) == 5
    assert disk.spares == 30  # ten were used, and ten objects deleted
