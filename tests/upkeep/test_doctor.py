"""doctor detects and names guarantees that a storage backend breaks, and leaves nothing behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from casckpt.repository.repository import Repository
from casckpt.storage.base import Finding, Known, ListedObject, Traits
from casckpt.storage.local.store import LocalStore
from casckpt.storage.memory import MemoryReader, MemoryStore
from casckpt.upkeep.doctor import examine
from tests.support.faulty import FaultyStore, fail_before
from tests.support.gcs import run_gc
from tests.support.repositories import Ticks, repository, save


def findings(storage: MemoryStore | FaultyStore, tmp_path: Path) -> dict[str, Finding]:
    """Return the findings by name."""
    repo = Repository(storage, tmp_path / "cache", clock=Ticks())
    return {finding.name: finding for finding in examine(repo)}


def bad(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if finding.ok is False}


class Own(MemoryStore):
    """Storage in memory."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or uuid4().hex)


class Replacing(Own):
    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        self.replace(key, data)


class Forgetful(Own):
    def get(self, key: str, *, limit: int) -> bytes:
        return super().get(key, limit=limit)[:-1]


class Misaligned(Own):
    """Every range begins at the next even byte."""

    def open(self, key: str, *, shared: bool = False) -> MemoryReader:
        class Even(MemoryReader):
            def read_into(self, offset: int, buffers: object) -> None:
                super().read_into(offset - offset % 2, buffers)  # type: ignore[arg-type]  # as it came

        return Even(key, self._find(key))


class Cutting(Own):
    """Every object ends after 100 bytes."""

    def open(self, key: str, *, shared: bool = False) -> MemoryReader:
        return MemoryReader(key, self._find(key)[:100])


class Lagging(Own):
    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        return iter([*super().list(prefix, known=known)][1:])


class Undead(Own):
    def delete(self, key: str) -> None:
        """Report success without deleting the object."""


class Stale(Own):
    @property
    def traits(self) -> Traits:
        return Traits(remote=False, read_gap=0, parallel=1, exclusive=True, stale="it is on NFS")


class Set(Own):
    def examine(self) -> Iterator[Finding]:
        yield Finding("lifecycle", False, "a rule deletes all", "remove it")


def test_doctor_accepts_storage_that_keeps_all_guarantees(tmp_path: Path) -> None:
    storage = Own()
    found = findings(storage, tmp_path)
    assert bad(found) == set()
    assert [name for name, one in found.items() if one.ok] == [
        "write", "create-only", "read-after-write", "ranges", "list-after-write", "delete",
    ]  # fmt: skip
    assert {name for name, one in found.items() if one.ok is None} == {"store"}
    assert list(storage.list("")) == []


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Replacing, {"create-only"}),
        (Forgetful, {"read-after-write", "create-only"}),
        (Misaligned, {"ranges"}),
        (Cutting, {"ranges"}),
        (Lagging, {"list-after-write"}),
        (Undead, {"delete"}),
        (Stale, {"list-after-write"}),
        (Set, {"lifecycle"}),
    ],
)
def test_doctor_names_broken_guarantees(make: Callable[[], Own], names: set[str], tmp_path: Path) -> None:
    found = findings(make(), tmp_path)
    assert bad(found) == names
    assert all(found[name].advice for name in names)


def test_doctor_does_not_advise_a_single_writer_to_be_one(tmp_path: Path) -> None:
    found = {one.name: one for one in examine(Repository(Replacing(), tmp_path / "cache", single_writer=True))}
    assert bad(found) == set()
    assert (found["create-only"].ok, found["create-only"].advice) == (None, "")


def test_doctor_stops_without_write_permission(tmp_path: Path) -> None:
    storage = FaultyStore(Own(), [fail_before("put", times=1000)])
    assert bad(findings(storage, tmp_path)) == {"write"}
    assert storage.count("get") == 0


def test_doctor_without_delete_permission_reports_what_gc_needs(tmp_path: Path) -> None:
    found = findings(FaultyStore(Own(), [fail_before("delete", times=1000)]), tmp_path)
    assert bad(found) == set()
    assert "gc needs" in found["delete"].advice


def test_failing_storage_is_reported_as_a_finding(tmp_path: Path) -> None:
    found = findings(FaultyStore(Own(), [fail_before("list", times=1000)]), tmp_path)
    assert bad(found) == {"create-only", "list-after-write", "delete", "store"}


def test_doctor_records_its_result_in_the_settings(tmp_path: Path) -> None:
    class Unknown(Own):
        @property
        def traits(self) -> Traits:
            return Traits(remote=True, read_gap=0, parallel=4, exclusive=None)

    class Worse(Replacing, Unknown):
        pass

    good = Unknown()
    repo = repository(tmp_path, good)
    repo.change_settings(exclusive_create=False)
    findings(good, tmp_path)
    assert repo.settings.exclusive_create
    findings(Worse(good.name), tmp_path)  # the same objects on a different kind of server
    assert repo.settings.exclusive_create is False


@pytest.mark.parametrize("next_one", ["doctor", "gc"])
def test_the_next_doctor_or_gc_removes_what_a_killed_doctor_left(next_one: str, tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    next(examine(repo))
    left = {entry.key for entry in repo.storage.list("probes/")}
    assert left
    clock = repo.clock
    assert isinstance(clock, Ticks)
    for hours, expected in ((20, left), (5, set())):
        clock.advance(hours * 3600)
        deque(examine(repo), maxlen=0) if next_one == "doctor" else run_gc(repo)
        assert {entry.key for entry in repo.storage.list("probes/")} == expected
    assert [*(tmp_path / "store").glob("probes/*")] == []  # gc leaves folders at the top


def test_doctor_calls_no_checkpoint_readable_if_there_is_none(tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    repo.create()
    assert {one.name: one for one in examine(repo)}["store"].found == "checkpoints listed: 0"


def test_doctor_says_what_a_user_of_the_store_would_meet(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o2775)
    repo = repository(tmp_path, LocalStore(root))
    save(repo, texts=["old"])
    commit = save(repo, step=2, texts=["new"])
    assert {one.name: one.ok for one in examine(repo) if one.name in ("store", "links", "permissions")} == {
        "store": True
    }
    (root / "commits").chmod(0o700)
    (blob,) = (root / "objects" / commit.txid).glob("*.safetensors")
    blob.rename(tmp_path / "moved")
    blob.symlink_to(tmp_path / "moved")
    found = {one.name: one for one in examine(repo)}
    assert [found[name].ok for name in ("store", "links", "permissions")] == [False] * 3
    assert "symlink" in found["store"].found
    assert f"1 of its files are links, such as {blob}" in found["links"].found
    assert f"such as {root / 'commits'}" in found["permissions"].found
    (root / "casckpt.json").rename(tmp_path / "marker")
    (root / "casckpt.json").symlink_to(tmp_path / "marker")
    assert "casckpt.json is a symlink" in {one.name: one for one in examine(repo.fresh())}["store"].found
    (root / "casckpt.json").unlink()
    (lost,) = (one for one in examine(repo.fresh()) if one.name == "store")
    assert not lost.ok
    assert "casckpt.json is missing" in lost.found


def test_doctor_only_notes_that_others_cannot_read_files_in_a_folder_of_one_user(tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    (tmp_path / "store").chmod(0o755)
    (tmp_path / "store/casckpt.json").chmod(0o400)
    assert [one.ok for one in examine(repo) if one.name == "permissions"] == [None]
