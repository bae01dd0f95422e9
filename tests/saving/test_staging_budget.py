"""The copies of all processes of a host fit into its budget, whichever process dies or forks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

import pytest

from casckpt.repository.blob_cache import BlobCache
from casckpt.saving import staging_budget as module
from casckpt.saving.staging_budget import FOLDER, Shortage, StagingBudget, shortages
from tests.support.forks import forked

Make: TypeAlias = Callable[..., StagingBudget]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def make(root: Path) -> Make:
    """Return a function that makes the budget of one more process."""
    return lambda limit=100: StagingBudget(BlobCache(root, in_memory=True), limit)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    return lambda nbytes: monkeypatch.setattr(module, "headroom", lambda: nbytes)


def copied(budget: StagingBudget, nbytes: int, held: int = 0) -> Shortage | None:
    """Claim memory. If the copy fits, make it, and otherwise save without it."""
    shortage = budget.claim(nbytes, held)
    budget.settle(nbytes if shortage is None else 0)
    return shortage


def test_the_copies_of_several_processes_share_the_limit(make: Make, root: Path) -> None:
    one, two, three = make(), make(), make()
    assert copied(one, 60) is None
    assert copied(two, 41) == Shortage(101, 100)
    assert copied(two, 40) is None
    assert copied(three, 1) == Shortage(101, 100)
    one.settle(59)
    assert copied(three, 1) is None
    assert copied(three, 2, held=1) == Shortage(101, 100)
    assert root.stat().st_mode & 0o777 == 0o700


def test_of_two_processes_that_claim_at_the_same_time_one_sees_the_claim_of_the_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make(), make()
    inside: list[Shortage | None] = []
    others = one._others

    def meanwhile() -> Iterator[tuple[int, int]]:
        found = list(others())
        inside.append(two.claim(60, 0))
        return iter(found)

    monkeypatch.setattr(one, "_others", meanwhile)
    assert (one.claim(60, 0), inside) == (None, [Shortage(120, 100)])


def test_by_default_copies_leave_a_fifth_of_the_free_memory(make: Make, free: Callable[[int | None], None]) -> None:
    one, two = make(None), make(None)
    free(100)
    assert one.claim(81, 0) == Shortage(81, 80)
    assert one.claim(50, 0) is None
    assert two.claim(31, 0) == Shortage(81, 80)  # the other copy does not take memory yet
    one.settle(50)
    free(50)
    assert copied(two, 41) == Shortage(91, 90)
    assert copied(two, 40) is None
    free(10)
    assert copied(one, 49, held=50) == Shortage(89, 88)
    free(None)
    assert copied(one, 1000) is None


def test_a_killed_process_does_not_keep_its_claim(make: Make, root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from casckpt.repository.blob_cache import BlobCache;"
        "from casckpt.saving.staging_budget import StagingBudget;"
        "budget = StagingBudget(BlobCache(Path(sys.argv[1]), in_memory=True), 100);"
        "print(budget.claim(60, 0), flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"None\n"
        budget = make()
        assert copied(budget, 41) == Shortage(101, 100)
        process.kill()
        process.wait()
    assert copied(budget, 100) is None
    assert len(list((root / FOLDER).iterdir())) == 1


def test_a_forked_child_does_not_keep_the_claim(make: Make) -> None:
    budgets = [make()]
    assert copied(budgets[0], 60) is None
    with forked(lambda: None):
        assert copied(make(), 60) == Shortage(120, 100)
        budgets.clear()
        assert copied(make(), 60) is None


def test_a_forked_child_cannot_release_the_claim(make: Make) -> None:
    budget = make()
    assert copied(budget, 60) is None

    def release() -> None:
        budget.settle(0)
        budget.close()

    with forked(release):
        pass
    assert copied(make(), 60) == Shortage(120, 100)


def test_the_empty_file_of_a_process_that_was_killed_early_is_removed(make: Make, root: Path) -> None:
    budget = make()
    assert copied(budget, 1) is None
    (root / FOLDER / "new").touch()
    assert copied(budget, 100, held=1) is None
    assert len(list((root / FOLDER).iterdir())) == 1


def test_a_claim_that_is_not_written_yet_counts_nothing_and_remains(
    make: Make, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process claims memory before this one locks its file, and again after this one locks its next file."""
    one, two = make(), make()
    assert copied(two, 30) is None
    flock, moments = fcntl.flock, ["before", "after"]

    def meanwhile(fd: int, kind: int) -> None:
        moment = moments.pop(0) if kind & fcntl.LOCK_EX and moments else ""
        if moment == "before":
            assert copied(two, 31) is None
        flock(fd, kind)
        if moment == "after":
            assert copied(two, 32) is None

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    assert copied(one, 69) == Shortage(101, 100)
    assert copied(one, 68) is None
    assert moments == []
    assert len(list((root / FOLDER).iterdir())) == 2


def test_a_claim_does_not_wait_for_a_process_that_looks_at_its_file(
    make: Make, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, flock, others = make(), make(), fcntl.flock, list[IO[bytes]]()

    def seen(fd: int, kind: int) -> None:
        if not others:
            others.append(next((root / FOLDER).iterdir()).open("rb"))
            flock(others[0], fcntl.LOCK_SH)
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", seen)
    assert copied(one, 60) is None
    others[0].close()
    assert copied(two, 41) == Shortage(101, 100)


def test_a_removed_file_is_written_again(make: Make, root: Path) -> None:
    one, two = make(), make()
    assert copied(one, 60) is None
    for path in (root / FOLDER).iterdir():
        path.unlink()
    assert copied(one, 61, held=60) is None
    assert copied(two, 60) == Shortage(121, 100)


def test_a_copy_that_stays_is_written_again_if_its_file_was_removed(make: Make, root: Path) -> None:
    one, two = make(), make()
    assert copied(one, 60) is None
    for path in (root / FOLDER).iterdir():
        path.unlink()
    one.settle(60)  # a save that needs no more memory
    assert copied(two, 41) == Shortage(101, 100)
    assert copied(two, 40) is None


@pytest.fixture(params=["missing", "mode", "file"])
def unusable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobCache]:
    root = tmp_path / "root"
    if request.param == "missing":
        root = tmp_path / "missing" / "root"
    elif request.param == "mode":
        root.mkdir()
        root.chmod(0o755)
    else:
        root.write_text("")
    yield BlobCache(root, in_memory=True)
    assert request.param != "mode" or not os.listdir(root)


def test_without_a_common_folder_rank_0_adds_up_the_copies_of_each_host(unusable: BlobCache) -> None:
    budget = StagingBudget(unusable, 100)
    assert budget.claim(100, 0) is None
    assert budget.claim(101, 0) == Shortage(101, 100)
    here, there = [budget.claim(nbytes, 0, host) for nbytes, host in ((60, "here"), (90, "there"))]
    assert shortages([here, None, there, budget.claim(40, 0, "here")]) == []
    assert shortages([here, None, there, budget.claim(41, 0, "here")]) == [
        (Shortage(101, 100, "here"), 0),
        (Shortage(101, 100, "here"), 3),
    ]
    budget.settle(0)
