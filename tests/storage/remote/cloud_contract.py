"""The contract of cloud storage accessed through fsspec: all guarantees but one, and a realistic workload.

A subclass provides the fixture ``cloud``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import Conflict, NotFound
from casckpt.storage import open_storage
from casckpt.storage.base import ObjectStore
from casckpt.upkeep.doctor import examine
from tests.storage.contract import Peek, SharedContract
from tests.support.clouds import Cloud


# both clients pass bytes to aiohttp
@pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes:ResourceWarning")
class CloudContract(SharedContract):
    """The contract without the guarantee that versions of an object are distinguished."""

    racers = 2  # each has to import the cloud's client
    test_an_open_reader_does_not_mix_two_objects: Callable[..., None] | None = None  # type: ignore[assignment]  # not promised

    @pytest.fixture
    def bucket(self, cloud: Cloud) -> str:
        return cloud.new_bucket()

    @pytest.fixture
    def storage(self, cloud: Cloud, bucket: str) -> ObjectStore:
        return open_storage(f"{cloud.scheme}://{bucket}/deep/store", cloud.options)

    @pytest.fixture
    def peek(self, cloud: Cloud, bucket: str) -> Peek:
        return lambda key: cloud.look(bucket, f"deep/store/{key}")

    def test_saves_loads_and_gc_work_in_the_cloud(self, cloud: Cloud, tmp_path: Path) -> None:
        """Users do not have to guarantee a single writer, because creates are exclusive, and the probe detects this."""
        import torch

        url = f"{cloud.scheme}://{cloud.new_bucket()}/team/store"
        store = casckpt.open(url, storage_options=cloud.options, cache_dir=tmp_path / "cache")
        state: dict[str, Any] = {"w": torch.arange(1_000_000), "note": "x"}
        for step in (1, 2):
            state["w"] += 1
            store.save(state, run="r", step=step)
        with pytest.raises(Conflict):
            store.save(state, run="r", step=2)
        assert store.repository.settings.exclusive_create
        assert torch.equal(store.read("r@2")["w"], state["w"])
        store.forget("r@1")
        assert store.gc(min_age=0, wait=0).deleted_blobs == 1
        assert not store.verify().is_damaged
        assert not [found for found in examine(store.repository) if found.ok is False]

    def test_a_missing_bucket_raises_not_found(self, cloud: Cloud, tmp_path: Path) -> None:
        url = f"{cloud.scheme}://no-such-bucket/store"
        store = casckpt.open(url, storage_options=cloud.options, cache_dir=tmp_path)
        with pytest.raises(NotFound, match="no such bucket or container: create it first"):
            store.save({"a": 1}, step=0)
