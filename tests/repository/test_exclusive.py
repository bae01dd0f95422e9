"""casckpt detects storage on which two writers can both succeed, and refuses it before storing anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from casckpt.base.parallel import in_parallel
from casckpt.contents.blobs import mark_damaged
from casckpt.errors import StorageError, Unsupported
from casckpt.format.keys import damaged_key
from casckpt.format.names import BlobHash
from casckpt.repository.exclusive import PREFIX, RACERS, new_name, probe, remove_leftovers
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists, Finding, Known, ListedObject, ObjectStore, Traits
from casckpt.storage.memory import MemoryStore
from casckpt.upkeep.doctor import examine
from tests.support.faulty import FaultyStore, fail_before
from tests.support.repositories import Ticks, commit_bare, repository


class Unknown(MemoryStore):
    """Storage whose creates are exclusive, but which does not declare this."""

    exclusive: bool | None = None

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or uuid4().hex)
        self.puts: list[str] = []

    @property
    def traits(self) -> Traits:
        return Traits(remote=True, read_gap=0, parallel=4, exclusive=self.exclusive)

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        self.puts.append(key)
        super().put(key, data, settle=settle)


class Ignoring(Unknown):
    """Storage that silently ignores the condition of a create."""

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        self.puts.append(key)
        self.replace(key, data)


class LooksFirst(Unknown):
    """Storage that checks for the key and then writes, so that several concurrent writers succeed."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = threading.Barrier(RACERS)

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        if self.size(key) is not None:
            raise AlreadyExists(key)
        if key.endswith("race"):
            self._looked.wait()
        self.replace(key, data)


class Lying(Unknown):
    """Storage that reports success to one writer, but keeps the bytes of a different one."""

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        if self.size(key) is not None:
            self.replace(key, data)
            raise AlreadyExists(key)
        super().put(key, data)


def counter() -> Callable[[int], bytes]:
    """Entropy that never repeats."""
    count = iter(range(1000))
    return lambda size: next(count).to_bytes(size, "big")


def test_storage_with_exclusive_creates_passes_the_probe_and_is_left_clean() -> None:
    store = Unknown()
    assert probe(store, Ticks(), counter()) == ""
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    ("make", "why"), [(Ignoring, "a second create replace"), (LooksFirst, "4 of 4"), (Lying, "bytes of a different")]
)
def test_a_failed_probe_explains_the_failure(make: Callable[[], Unknown], why: str) -> None:
    store = make()
    assert why in probe(store, Ticks(), counter())
    assert list(store.list("")) == []


def test_a_probe_does_not_need_permission_to_delete() -> None:
    store = FaultyStore(Unknown(), [fail_before("delete", times=9)])
    assert probe(store, Ticks(), counter()) == ""
    assert {entry.key.split("/")[0] + "/" for entry in store.list("")} == {PREFIX}


def test_a_store_is_not_created_on_storage_that_replaces_objects(tmp_path: Path) -> None:
    repo = Repository(Ignoring(), tmp_path / "cache")
    with pytest.raises(Unsupported, match=r"a second create replace.*single_writer"):
        repo.create()
    assert list(repo.storage.list("")) == []


def test_a_store_on_storage_that_replaces_objects_is_not_written_to(tmp_path: Path) -> None:
    good = repository(tmp_path, Unknown())
    moved = Repository(Ignoring(), tmp_path / "cache2", clock=Ticks())
    for entry in good.storage.list(""):
        if not entry.key.startswith("settings/"):
            moved.storage.replace(entry.key, good.storage.get(entry.key, limit=1 << 20))
    before = set(moved.storage.list(""))
    with pytest.raises(Unsupported, match="replaced the first"):
        commit_bare(moved)
    assert set(moved.storage.list("")) == before
    commit_bare(replace(moved, single_writer=True))


def test_the_probe_runs_once_and_its_result_is_recorded(tmp_path: Path) -> None:
    store = Unknown()
    repo = repository(tmp_path, store)
    assert repo.settings.exclusive_create
    probes = sum(key.startswith(PREFIX) for key in store.puts)
    assert probes == 2 + RACERS
    commit_bare(repo)
    commit_bare(Repository(store, tmp_path / "other", clock=Ticks(), entropy=counter()), step=1)
    assert sum(key.startswith(PREFIX) for key in store.puts) == probes


def test_a_store_copied_from_elsewhere_is_probed_on_the_first_write(tmp_path: Path) -> None:
    repo = repository(tmp_path, Unknown())
    repo.storage.delete("settings/0")
    fresh = Repository(repo.storage, tmp_path / "other", clock=Ticks())
    assert fresh.settings.exclusive_create is None
    commit_bare(fresh)
    assert fresh.settings.exclusive_create


def test_the_settings_override_the_probe(tmp_path: Path) -> None:
    repo = repository(tmp_path, Unknown())
    repo.change_settings(exclusive_create=False)
    with pytest.raises(Unsupported, match="settings"):
        commit_bare(Repository(repo.storage, tmp_path / "other", clock=Ticks()))


def test_storage_known_to_be_exclusive_is_not_probed(tmp_path: Path) -> None:
    for says in (False, True):
        store: ObjectStore = Unknown()
        store.exclusive = says  # type: ignore[attr-defined]  # of Unknown
        repo = Repository(store, tmp_path / "cache")
        if says:
            assert repo.create()
        else:
            with pytest.raises(Unsupported, match="in one step"):
                repo.create()
        assert not any(key.startswith(PREFIX) for key in store.puts)  # type: ignore[attr-defined]  # of Unknown


def test_a_failing_probe_is_inconclusive(tmp_path: Path) -> None:
    store = FaultyStore(Unknown(), [fail_before("put", key=f"{PREFIX}*")])
    repo = Repository(store, tmp_path / "cache")
    with pytest.raises(StorageError):
        repo.create()
    assert repo.create()


class Losing(Unknown):
    """Storage that loses its first responses, and reports to the repeated puts that the key exists."""

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        super().put(key, data, settle=settle)
        raise AlreadyExists(key)


def test_a_probe_whose_responses_are_lost_is_inconclusive(tmp_path: Path) -> None:
    assert probe(Losing(), Ticks(), counter()) == ""
    assert all(found.ok is not False for found in examine(Repository(Losing(), tmp_path)))


class Hiding(Unknown):
    """Storage whose listings lack keys that contain ``hidden``."""

    hidden = ""

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        return (entry for entry in super().list(prefix) if not self.hidden or self.hidden not in entry.key)


def test_a_store_is_not_created_on_storage_whose_listings_lack_new_objects(tmp_path: Path) -> None:
    storage = Hiding()
    repo, storage.hidden = Repository(storage, tmp_path), "-twice"
    with pytest.raises(StorageError, match=r"does not list probes/.*-twice, although it exists: gc could"):
        repo.create()
    (finding,) = (found for found in examine(repo) if found.ok is False)
    assert "does not list probes/" in finding.found
    storage.hidden = ""
    assert list(storage.list("")) == []


class Expiring(Unknown):
    """Storage with a rule that deletes objects, which only some credentials may read."""

    may_read = True

    def examine(self) -> Iterator[Finding]:
        if not self.may_read:
            raise StorageError("the settings cannot be read")
        yield Finding("lifecycle", False, "a rule deletes objects", "remove the rule")


def test_a_store_is_not_created_where_a_rule_is_seen_to_delete_its_objects(tmp_path: Path) -> None:
    storage = Expiring()
    with pytest.raises(Unsupported, match=r"a rule deletes objects\. To fix this, remove the rule"):
        Repository(storage, tmp_path).create()
    assert list(storage.list("")) == []
    storage.may_read = False
    assert Repository(storage, tmp_path).create()


def test_a_change_whose_key_no_listing_shows_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    """With ``single_writer``, no probe has found out that listings lack keys."""
    repo = replace(repository(tmp_path, Hiding()), single_writer=True)
    blob, txid = BlobHash("b" * 64), repo.new_txid("r", 1)
    repo.change_settings(min_age_seconds=1)
    mark_damaged(repo, txid, blob, "wrong bytes")
    for key, change in (
        ("settings/1", lambda: repo.change_settings(min_age_seconds=2)),
        (damaged_key(txid, blob, 0), lambda: mark_damaged(repo, txid, blob, "wrong again")),
    ):
        repo.storage.hidden = key  # type: ignore[attr-defined]  # of Hiding
        with pytest.raises(StorageError, match=f"does not list {key}, although it exists: .* Use storage that lists"):
            change()


def test_stores_and_probes_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    storage = Unknown()
    repos = [Repository(storage, tmp_path / str(number)) for number in range(6)]
    together = threading.Barrier(len(repos))

    def begin(repo: Repository) -> object:
        together.wait()
        if repo in repos[:2]:
            return [finding for finding in examine(repo) if finding.ok is False]
        return repo.create()

    found = list(in_parallel(len(repos), begin, repos))
    assert found[:2] == [[], []]
    assert sorted(map(bool, found[2:])) == [False, False, False, True], "one of them created the store"
    assert len({repo.marker.store_id for repo in repos}) == 1
    assert repos[0].settings.exclusive_create
    assert {entry.key.split("/")[0] for entry in storage.list("")} == {"casckpt.json", "settings"}


def test_leftovers_of_killed_probes_are_removed_after_a_day_and_nothing_else() -> None:
    storage, clock = Unknown(), Ticks()
    killed = [f"{new_name(clock, counter())}-twice", f"{new_name(clock, counter())}/large-0"]
    clock.advance(3600)
    running = f"{new_name(clock, counter())}-race"
    for key in (*killed, running, f"{PREFIX}of-somebody", f"{PREFIX}{'0' * 32}/1", "settings/0"):
        storage.put(key, b"1")
    clock.advance(23 * 3600 - 1)
    remove_leftovers(storage, clock)
    assert {*killed} <= {entry.key for entry in storage.list("")}
    clock.advance(60)
    remove_leftovers(storage, clock)
    left = {entry.key for entry in storage.list("")}
    assert left == {running, f"{PREFIX}of-somebody", f"{PREFIX}{'0' * 32}/1", "settings/0"}
