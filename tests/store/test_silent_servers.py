"""If a server stops responding, saves and loads end on all ranks, and earlier checkpoints are preserved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import casckpt
from casckpt.errors import StorageError
from casckpt.repository.repository import Repository
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.store.store import Store
from tests.support.buckets import state
from tests.support.proxy import Proxy
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import CELL, cells, same_state, steps
from tests.support.servers import Server

IMPATIENT = {"request_timeout": 3, "call_timeout": 4}  # a busy machine answers within seconds
BEGIN, UPLOAD, COMMIT = 2, 5, 9
"""Request numbers in a save: the first request of each stage."""


def opened(options: Mapping[str, Any], bucket: str, cache: Path) -> Store:
    """Open the store in a bucket, with small cells and blobs."""
    store = Store(Repository(RemoteStore(RemoteLocation("s3", f"{bucket}/store", options)), cache))
    store.create(cell_bytes=CELL, blob_bytes=64 << 10)
    return store


@pytest.mark.timeout(120)
@pytest.mark.parametrize("after", [BEGIN, UPLOAD, COMMIT])
def test_a_save_ends_when_the_server_falls_silent(after: int, moto_server: Server, tmp_path: Path) -> None:
    bucket = moto_server.new_bucket()
    with Proxy(moto_server.endpoint) as proxy:
        opened(moto_server.options, bucket, tmp_path / "other").save(state(0), step=0)
        store = opened({**moto_server.options, "endpoint_url": proxy.endpoint, **IMPATIENT}, bucket, tmp_path)
        proxy.mute(after=after)
        with pytest.raises(StorageError, match="_timeout in storage_options"):
            store.save(state(1), step=1)
        with pytest.raises(StorageError, match=r"after an earlier timeout, this call had only 0\.75 s"):
            store.read("default@0")
        proxy.calm()
        there = steps(opened(moto_server.options, bucket, tmp_path / "other"))
        assert there in ([("default", 0)], [("default", 0), ("default", 1)])  # a commit may arrive late
        store.save(state(2), step=2)
        assert same_state(store.read("default@2"), state(2))


def save_on_ranks(rank: int, size: int, options: list[Mapping[str, Any]], bucket: str, cache: Path) -> Any:
    """Save as one of the ranks, and return the outcome. Each rank has its own connection to the server."""
    store = opened({**options[rank], **IMPATIENT}, bucket, cache / str(rank))
    found = outcome_of(lambda: store.save({"own": casckpt.PerRank(cells(40, seed=rank))}, step=1))
    dist.barrier()
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("silent", "path"), [(0, "/commits/*"), (1, ".safetensors")])
def test_a_server_that_is_silent_to_one_rank_fails_the_save_on_all_ranks(
    silent: int, path: str, ranks: Pool, moto_server: Server, tmp_path: Path
) -> None:
    bucket = moto_server.new_bucket()
    opened(moto_server.options, bucket, tmp_path / "mine")
    with Proxy(moto_server.endpoint) as proxy:
        proxy.mute(path)
        ways: list[Mapping[str, Any]] = [moto_server.options, moto_server.options]
        ways[silent] = {**moto_server.options, "endpoint_url": proxy.endpoint}
        found = ranks.run(2, save_on_ranks, ways, bucket, tmp_path)
    assert [type(error) for error in found] == [StorageError, StorageError]
    assert all("_timeout in storage_options" in str(error) for error in found)
    assert f"rank {silent}" in str(found[1 - silent])
