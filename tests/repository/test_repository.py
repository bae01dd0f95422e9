"""The marker, the settings, transaction IDs, and puts of records whose response is lost."""

from __future__ import annotations

import pickle
import random
from contextlib import suppress
from pathlib import Path

import pytest

from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, Refused, StorageError
from casckpt.format.keys import commit_key, make_txid, parse_txid
from casckpt.format.names import TxId
from casckpt.format.records import Forgotten, changed, encode_marker
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository, microseconds, open_repository
from casckpt.storage.local.store import LocalStore
from tests.support.faulty import Call, FaultyStore, call_first, fail_after, fail_before
from tests.support.repositories import MARKER, Ticks, commit_bare, memory, repository


def test_opening_a_missing_store_does_not_create_it_and_raises_an_error_with_advice(tmp_path: Path) -> None:
    repo = Repository(memory(), tmp_path)
    assert not repo.exists()
    with pytest.raises(NotFound, match=r"there is no store at \w+://.*casckpt init"):
        _ = repo.marker
    assert list(repo.storage.list("")) == []


def test_create_writes_a_marker_once_and_keeps_its_sizes(tmp_path: Path) -> None:
    storage = memory()
    one, two = Repository(storage, tmp_path), Repository(storage, tmp_path)
    assert one.create(cell_bytes=1 << 16, blob_bytes=1 << 20)
    assert not two.create(cell_bytes=1 << 14)
    assert one.marker == two.marker
    assert (two.marker.cell_bytes, two.marker.blob_bytes) == (1 << 16, 1 << 20)
    assert one.exists()
    assert two.exists()


def test_a_store_without_its_marker_is_not_recreated(tmp_path: Path) -> None:
    storage = memory()
    commit_bare(repository(tmp_path, storage))
    marker = storage.get("casckpt.json", limit=1 << 20)
    storage.delete("casckpt.json")
    repo = Repository(storage, tmp_path)
    for attempt in (lambda: repo.create(cell_bytes=1 << 14), repo.check_exists, lambda: list_commits(repo)):
        with pytest.raises(
            Damaged, match=r"casckpt\.json is missing from \S+, although .*restore the file from a copy"
        ):
            attempt()
    storage.put("casckpt.json", marker)
    assert not repo.create()
    assert len(list_commits(repo).visible()) == 1


def test_a_process_that_loses_the_race_to_create_a_store_uses_the_existing_one(tmp_path: Path) -> None:
    """A different process creates the store and saves between this process's search for a marker and for records."""
    storage = FaultyStore(memory())
    other = Repository(storage.inner, tmp_path / "other")

    def save(_: Call) -> None:
        other.create()
        commit_bare(other)

    storage.inject(call_first("list", save, key="commits/"))
    repo = Repository(storage, tmp_path)
    assert not repo.create(cell_bytes=1 << 14)
    assert repo.marker == other.marker


@pytest.mark.parametrize("at", range(1, 4))
def test_a_store_left_incomplete_by_a_kill_is_completed(tmp_path: Path, at: int) -> None:
    inner = memory(near=False)
    killed = Repository(FaultyStore(inner, [fail_before("put", at=at, times=9)]), tmp_path)
    with suppress(StorageError):
        killed.create()
    repo = Repository(inner, tmp_path)
    repo.create()
    commit_bare(repo)
    assert len(list_commits(repo).visible()) == 1


def test_store_ids_are_distinct_hex_strings(tmp_path: Path) -> None:
    ids = set()
    for _ in range(3):
        repo = Repository(memory(), tmp_path)
        repo.create()
        ids.add(repo.marker.store_id)
        assert int(repo.marker.store_id, 16) >= 0
        assert len(repo.marker.store_id) == 32
    assert len(ids) == 3


def test_sizes_outside_the_limits_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    repo = Repository(memory(), tmp_path)
    with pytest.raises(InvalidInput, match="outside the format's limits"):
        repo.create(cell_bytes=100)
    assert not repo.exists()


def test_a_marker_whose_response_was_lost_counts_as_written(tmp_path: Path) -> None:
    repo = Repository(FaultyStore(memory(), [fail_after("put")]), tmp_path)
    assert repo.create()


def test_a_failure_to_write_the_marker_raises_an_error(tmp_path: Path) -> None:
    repo = Repository(FaultyStore(memory(), [fail_before("put")]), tmp_path)
    with pytest.raises(StorageError):
        repo.create()
    assert not repo.exists()


@pytest.mark.parametrize("store_id", ["../../etc", "", "a" * 65, "a/b", ".."])
def test_a_store_id_that_is_not_a_folder_name_is_rejected(tmp_path: Path, store_id: str) -> None:
    storage = memory()
    storage.put("casckpt.json", encode_marker(changed(MARKER, store_id=store_id)))
    with pytest.raises(Refused, match="invalid store id"):
        _ = Repository(storage, tmp_path).catalogue


@pytest.mark.parametrize("user", ["a" * 101, "ann\n", "\udcff"])
def test_an_unusable_name_of_a_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    monkeypatch.setenv("CASCKPT_USER", user)
    with pytest.raises(InvalidInput, match=r"CASCKPT_USER=.* is not valid: set it to a name of up to 100 printable"):
        open_repository(memory(), tmp_path)


def test_an_incomplete_marker_is_reported_as_damaged(tmp_path: Path) -> None:
    storage = memory()
    storage.put("casckpt.json", b'{"format": 1, "sto')
    with pytest.raises(Damaged, match=r"casckpt\.json is damaged.*restore the file from a copy .* \w+:"):
        _ = Repository(storage, tmp_path).marker


def test_settings_have_defaults_and_generations(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    unset = repo.settings
    assert unset.min_age_seconds is None
    repo.change_settings(min_age_seconds=60.0)
    repo.change_settings(exclusive_create=True)
    now = repo.settings
    assert (now.min_age_seconds, now.exclusive_create) == (60.0, True)
    assert sorted(entry.key for entry in repo.storage.list("settings/")) == ["settings/0", "settings/1"]


def test_the_error_for_damaged_settings_gives_advice(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    repo.change_settings(min_age_seconds=60.0)
    repo.storage.put("settings/1", b"torn")
    with pytest.raises(Damaged, match=r"settings/1 is damaged.*Restore the file"):
        _ = repo.settings
    repo.storage.delete("settings/1")
    assert repo.settings.min_age_seconds == 60.0


def test_settings_generations_are_compared_numerically(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    for seconds in range(11):
        repo.change_settings(revoke_after_seconds=float(seconds))
    assert repo.settings.revoke_after_seconds == 10.0


@pytest.mark.parametrize("fields", [{"colour": 1}, {"created_at": 3}, {"min_age_seconds": "much"}])
def test_settings_that_cannot_be_read_back_are_not_written(tmp_path: Path, fields: dict[str, object]) -> None:
    repo = repository(tmp_path)
    with pytest.raises(InvalidInput):
        repo.change_settings(**fields)
    assert list(repo.storage.list("settings/")) == []


def test_two_simultaneous_settings_changes_both_take_effect(tmp_path: Path) -> None:
    storage = memory()
    other = repository(tmp_path, storage)

    def meanwhile(_: object) -> None:
        other.change_settings(min_age_seconds=5.0)

    repo = repository(tmp_path, FaultyStore(storage, [call_first("put", meanwhile)]))
    repo.change_settings(exclusive_create=False)
    assert (other.settings.min_age_seconds, other.settings.exclusive_create) == (5.0, False)


def test_a_new_transaction_id_sorts_after_all_ids_seen_before(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    ahead = make_txid(parse_txid(repo.new_txid("a", 1)).time.replace(year=2090), bytes(8), "a", 1)
    behind = repo.new_txid("a", 2)
    later = repo.new_txid("run/x", 7, after=[behind, ahead])
    assert behind < ahead < later
    assert parse_txid(later).step == 7
    assert repo.new_txid("a", 2) < ahead


def test_transaction_ids_created_at_the_same_instant_differ(tmp_path: Path) -> None:
    repo = repository(tmp_path, clock=Ticks(step=0))
    assert len({repo.new_txid("a", 1) for _ in range(50)}) == 50


@pytest.mark.parametrize(("run", "step"), [("", 1), ("a b", 1), ("a", -1), ("a", True), ("a", 2**63)])
def test_invalid_names_are_rejected_for_transaction_ids(tmp_path: Path, run: str, step: int) -> None:
    with pytest.raises(InvalidInput):
        repository(tmp_path).new_txid(run, step)


@pytest.mark.parametrize("time", ["99999999T000000000000Z", "99991231T235959999999Z"])
def test_transaction_ids_are_not_created_at_the_last_possible_time(tmp_path: Path, time: str) -> None:
    with pytest.raises(Refused):
        repository(tmp_path).new_txid("a", 1, after=[TxId(f"{time}-{'0' * 16}-{'0' * 16}-1")])


def test_a_record_whose_response_was_lost_counts_as_written(tmp_path: Path) -> None:
    repo = repository(tmp_path, FaultyStore(memory()))
    commit = commit_bare(repo)
    repo.storage.inject(fail_after("put"))  # type: ignore[attr-defined]  # a FaultyStore
    key = commit_key(commit.txid, 1)
    repo.put_record(key, Forgotten(txid=commit.txid, time=3, who="ann@node3"))
    repo.put_record(
        key, Forgotten(txid=commit.txid, time=3, who="ann@node3")
    )  # a retry by the storage itself finds the record
    with pytest.raises(Conflict, match="already exists"):
        repo.put_record(key, Forgotten(txid=commit.txid, time=4, who="ann@node3"))


def test_a_record_that_does_not_become_durable_raises_an_error(tmp_path: Path) -> None:
    repo = repository(tmp_path, FaultyStore(memory()))
    commit = commit_bare(repo)
    key = commit_key(commit.txid, 1)
    repo.storage.inject(fail_after("put"))  # type: ignore[attr-defined]  # a FaultyStore
    repo.storage.inject(fail_before("settle", key="commits"))  # type: ignore[attr-defined]  # a FaultyStore
    with pytest.raises(StorageError):
        repo.put_record(key, Forgotten(txid=commit.txid, time=3, who="ann@node3"))


def test_a_failure_to_write_a_record_raises_an_error(tmp_path: Path) -> None:
    repo = repository(tmp_path, FaultyStore(memory()))
    commit = commit_bare(repo)
    repo.storage.inject(fail_before("put"))  # type: ignore[attr-defined]  # a FaultyStore
    with pytest.raises(StorageError):
        repo.put_record(commit_key(commit.txid, 1), Forgotten(txid=commit.txid, time=3, who="ann@node3"))
    assert list_commits(repo).commits[commit.txid].last == "committed"


def test_a_failed_put_that_finds_a_different_record_raises_conflict(tmp_path: Path) -> None:
    storage = memory()
    repo = repository(tmp_path, FaultyStore(storage))
    commit = commit_bare(repo)
    key = commit_key(commit.txid, 1)
    repository(tmp_path, storage).put_record(key, Forgotten(txid=commit.txid, time=1, who="ann@node3"))
    repo.storage.inject(fail_before("put"))  # type: ignore[attr-defined]  # a FaultyStore
    with pytest.raises(Conflict):
        repo.put_record(key, Forgotten(txid=commit.txid, time=2, who="ann@node3"))


def test_records_that_would_be_unreadable_are_not_written(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    with pytest.raises(InvalidInput, match="larger than"):
        commit_bare(repo, metadata={"x": "y" * (1 << 20)})
    assert list_commits(repo).commits == {}


def test_a_repository_can_be_pickled(tmp_path: Path) -> None:
    repo = Repository(LocalStore(tmp_path / "store"), tmp_path / "cache", clock=microseconds)
    repo.create()
    commit = commit_bare(repo)
    assert list_commits(repo).commits.keys() == {commit.txid}
    copy = pickle.loads(pickle.dumps(repo))
    assert copy.marker == repo.marker
    assert list_commits(copy).commits.keys() == {commit.txid}
    assert copy.manifests is not repo.manifests


def test_the_store_id_is_derived_from_the_given_entropy(tmp_path: Path) -> None:
    one, two = (repository(tmp_path, entropy=random.Random(7).randbytes) for _ in range(2))
    assert one.marker.store_id == two.marker.store_id
