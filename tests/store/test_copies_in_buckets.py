"""Copies, a mirror and the cache with buckets, on an S3 emulator and on a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.store.store import Store
from tests.support.saves import blob_keys, cells, counted, same_state, small_folder, steps
from tests.support.scripts import Done, run_script
from tests.support.servers import Server


@pytest.fixture(params=[pytest.param("moto_server", marks=pytest.mark.soak), "seaweed_server"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def url(server: Server) -> str:
    return f"s3://{server.new_place()}/store"


@pytest.fixture
def bucket(server: Server, url: str) -> Callable[..., Store]:
    """Open the store in a new bucket."""
    return lambda **options: casckpt.open(url, storage_options=server.options, **options)


@pytest.fixture
def local(store_path: Path) -> Store:
    store = small_folder(store_path)
    shared = cells(100, seed=0)
    for step in (1, 2):
        store.save({"shared": shared, "own": cells(30, seed=step)}, run="sft", step=step, metadata={"loss": 0.5})
    return store


def same_stores(one: Store, other: Store) -> None:
    assert [(ckpt.id, ckpt.created_at) for ckpt in one.checkpoints()] == [
        (ckpt.id, ckpt.created_at) for ckpt in other.checkpoints()
    ]
    for ckpt in one.checkpoints():
        assert same_state(one.read(ckpt), other.read(other.get(ckpt.id)))
    assert not other.verify().is_damaged


def test_a_checkpoint_is_copied_to_a_bucket_and_back(
    local: Store, bucket: Callable[..., Store], tmp_path: Path
) -> None:
    local.tag("best", "sft@1")
    far = bucket()
    assert len(local.copy_to(far, tags=True).copied) == 2
    same_stores(local, far)
    with counted(far) as counts:
        assert len(local.copy_to(far).present) == 2
    assert counts.puts == counts.bytes_written == 0
    back = casckpt.open(tmp_path / "back")
    far.copy_to(back, tags=True)
    same_stores(local, back)
    assert [ckpt.step for ckpt in back.tags().values()] == [1]
    assert (back.repository.marker.cell_bytes, len(blob_keys(back))) == (4096, len(blob_keys(local)))


def test_processes_share_the_work_of_a_copy_to_a_bucket(
    local: Store, server: Server, url: str, bucket: Callable[..., Store], tmp_path: Path
) -> None:
    options = [f"--dst-option={name}={value}" for name, value in server.options.items()]

    def copy(host: str) -> Done:
        cache = tmp_path / host
        return run_script("casckpt", "copy", local.url, url, *options, "--json", "--cache-dir", cache)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(copy, ("host 0", "host 1")))
    assert [done.status for done in found] == [0, 0]
    assert [json.loads(done.printed)["failed"] for done in found] == [[], []]
    same_stores(local, bucket())
    assert len(blob_keys(bucket())) == len(blob_keys(local))


def test_a_mirror_can_be_in_a_bucket(local: Store, bucket: Callable[..., Store]) -> None:
    store = casckpt.open(local.url, mirror=bucket())
    store.save({"w": cells(3, seed=9)}, run="sft", step=3)
    store.wait_for_mirror()
    same_stores(store, bucket())
    assert store.gc(keep_last=1, min_age=0).waiting == ()
    assert (steps(local), len(steps(bucket()))) == ([("sft", 3)], 3)


def test_cached_blobs_are_transferred_once(local: Store, bucket: Callable[..., Store], tmp_path: Path) -> None:
    local.copy_to(bucket())
    far = bucket(cache_dir=tmp_path / "host")
    state: dict[str, Any] = local.read("sft@2")
    size = sum((tmp_path / "store" / key).stat().st_size for key in blob_keys(local))
    with counted(far) as counts:
        assert 0 < far.pre_download("sft@2") < size
    fetched = counts.bytes_read
    with counted(far) as counts:
        assert same_state(far.read("sft@2"), state)
        assert same_state(bucket(cache_dir=tmp_path / "host").read("sft@2"), state)
    assert counts.bytes_read < 20_000 < fetched  # records and a manifest
