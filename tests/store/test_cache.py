"""Loads with a host cache: cached blobs are not read from the store again, and damaged ones are not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Damaged, InvalidInput, MissingKey, NotFound
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.blob_cache import FOLDER, BlobCache
from casckpt.repository.repository import Repository
from casckpt.storage.local.reader import LocalReader
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.far import FarStore, far
from tests.support.progress_calls import ProgressCalls
from tests.support.saves import blob_keys, cells, flip, same_state, small


@pytest.fixture
def storage() -> FarStore:
    return far()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def state() -> dict[str, Any]:
    return {f"w{n}": cells(20, seed=n) for n in range(5)} | {"lr": 0.1}


@pytest.fixture
def store(storage: FarStore, state: dict[str, Any], folder: Path) -> Store:
    """A remote store with a checkpoint of several blobs, opened with a cache on this host."""
    small(storage).save(state, step=1)
    assert len(blob_keys(small(storage))) > 3
    return Store(Repository(storage, folder))


def cached(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*"))


def spoil_all(folder: Path) -> None:
    for path in cached(folder):
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)


def test_a_second_load_does_not_read_blobs_from_the_store(
    store: Store, storage: FarStore, state: dict[str, Any], folder: Path
) -> None:
    assert same_state(store.read("latest"), state)
    before = storage.reads_of_blobs()
    assert before == len(cached(folder)) == len(blob_keys(store))
    assert same_state(Store(Repository(storage, folder)).read("latest"), state)
    assert storage.reads_of_blobs() == before


def test_a_blob_of_which_only_a_part_is_read_is_not_cached(store: Store, storage: FarStore, folder: Path) -> None:
    small_part = casckpt.Shard(torch.zeros(10), global_shape=(20480,), offset=(0,), shape=(10,))
    store.load({"w1": small_part}, "latest")
    assert cached(folder) == []
    assert storage.reads_of_blobs() == 1


def test_nothing_is_cached_without_a_cache_folder(storage: FarStore, store: Store, state: dict[str, Any]) -> None:
    plain = Store(Repository(storage))
    for _ in range(2):
        before = storage.reads_of_blobs()
        assert same_state(plain.read("latest"), state)
        assert storage.reads_of_blobs() > before


def test_a_local_store_is_cached_only_on_request(tmp_path: Path, folder: Path, state: dict[str, Any]) -> None:
    near = Store(Repository(LocalStore(tmp_path / "near"), folder))
    near.save(state, step=1)
    near.read("latest")
    assert cached(folder) == []
    assert near.pre_download("latest") > 0
    assert len(cached(folder)) == len(blob_keys(near))
    for key in blob_keys(near):
        near.repository.storage.delete(key)
    assert same_state(near.read("latest"), state)


def test_a_load_does_not_query_an_empty_cache_for_each_blob(
    tmp_path: Path, folder: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    near = Store(Repository(LocalStore(tmp_path / "near"), folder))
    near.save(state, step=1)
    asked: list[BlobRef] = []
    opened = BlobCache.open

    def counting(cache: BlobCache, ref: BlobRef) -> LocalReader | None:
        asked.append(ref)
        return opened(cache, ref)

    monkeypatch.setattr(BlobCache, "open", counting)
    assert same_state(near.read("latest"), state)
    assert not asked
    near.pre_download("latest")
    assert same_state(near.read("latest"), state)
    assert len(asked) == len(blob_keys(near))


def test_prefetched_blobs_are_not_read_by_the_load(store: Store, storage: FarStore, state: dict[str, Any]) -> None:
    seen = ProgressCalls()
    fetched = store.pre_download("latest", progress=seen)
    assert fetched == seen.done == sum(entry.size for entry in storage.list("objects/") if "safetensors" in entry.key)
    assert store.pre_download("latest") == 0
    before = storage.reads_of_blobs()
    into = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    store.load(into, "latest")
    assert storage.reads_of_blobs() == before
    assert all(torch.equal(into[key], state[key]) for key in into)


def test_a_rank_prefetches_only_its_share(store: Store, folder: Path, state: dict[str, Any]) -> None:
    part = {"w1": casckpt.Shard(torch.zeros(10), global_shape=(20480,), offset=(0,), shape=(10,))}
    store.pre_download("latest", part)
    assert len(cached(folder)) == 1
    assert not part["w1"].data.any()
    store.pre_download("latest", {"renamed": state["w2"].clone()}, rename={"renamed": "w2"})
    assert len(cached(folder)) <= 4
    with pytest.raises(MissingKey, match="nothing"):
        store.pre_download("latest", {"nothing": torch.zeros(1)})
    with pytest.raises(NotFound):
        store.pre_download("other@1")


def test_damaged_cache_entries_are_dropped_and_read_from_the_store(
    store: Store, storage: FarStore, folder: Path, state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    store.pre_download("latest")
    spoil_all(folder)
    into = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    done = ProgressCalls()
    store.load(into, "latest", progress=done)
    assert all(torch.equal(into[key], state[key]) for key in into)
    assert "is damaged in this cache" in caplog.text
    assert done.done == sum(value.nbytes for value in into.values())
    assert same_state(store.read("latest"), state)


def test_a_blob_damaged_in_both_cache_and_store_is_reported(store: Store, folder: Path) -> None:
    store.pre_download("latest")
    spoil_all(folder)
    for key in blob_keys(store):
        flip(store, key, 5000)
    with pytest.raises(Damaged, match="casckpt verify"):
        store.read("latest")


def test_prefetch_reports_damage_before_the_load(store: Store) -> None:
    blob = blob_keys(store)[0]
    flip(store, blob, 5000)
    with pytest.raises(Damaged, match="casckpt repair") as raised:
        store.pre_download("latest")
    assert raised.value.blob == blob.split("/")[2].split(".")[0]


def test_damage_outside_the_requested_part_does_not_prevent_a_load(
    store: Store, storage: FarStore, state: dict[str, Any]
) -> None:
    """A load does not read the header of a blob."""
    for key in blob_keys(store):
        flip(store, key, 3000)
    assert same_state(store.read("latest"), state)


def test_the_cache_size_can_be_a_string(tmp_path: Path, storage: FarStore, store: Store) -> None:
    assert casckpt.open(tmp_path, cache_bytes="2GiB").repository.cache_bytes == 2 << 30
    tight = Store(Repository(storage, tmp_path / "tight", cache_bytes=100))
    with pytest.raises(InvalidInput, match="cache_bytes"):
        tight.pre_download("latest")
    assert len(tight.read("latest")) == 6
    with pytest.raises(InvalidInput, match="not a size"):
        casckpt.open(tmp_path, cache_bytes="much")
