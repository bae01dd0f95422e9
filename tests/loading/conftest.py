"""Fixtures that several tests of saves and loads share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.repository.repository import Repository
from casckpt.storage.local.syscalls import Lacking
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore
from tests.support.reads import pages
from tests.support.repositories import memory
from tests.support.saves import cells, small, small_folder


def state() -> dict[str, Any]:
    """Return several blobs, two equal tensors, a tensor without whole cells, and an object with a large buffer."""
    many = {f"w{n}": cells(15, seed=n) for n in range(6)}
    return many | {"same": cells(15, seed=0), "odd": cells(2.5, seed=99), "plain": b"x" * 70_000}


def zeros() -> dict[str, Any]:
    """Return a template for `state`."""
    return {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for key, one in state().items()}


def elsewhere(store: Store) -> Repository:
    """Open the store on a different host, without its faults."""
    storage = store.repository.storage
    assert isinstance(storage, FaultyStore)
    return Repository(storage.inner)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with small cells and blobs."""
    small_folder(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def droppable(disk_path: Path) -> Store:
    """A store with a checkpoint of 8 MiB that is not in the page cache."""
    store = casckpt.open(disk_path / "store")
    store.save({"w": torch.arange(1 << 20)}, step=0)
    try:
        held, _ = pages(store, drop=True)
    except Lacking:
        pytest.skip("this kernel does not count cached pages")
    if held:
        pytest.skip("this file system keeps its files in memory")
    return store


@pytest.fixture
def faults() -> FaultyStore:
    """The storage of `remote_store`."""
    return FaultyStore(memory(near=False))


@pytest.fixture
def remote_store(faults: FaultyStore) -> Store:
    """A store that reports itself as remote, with `tests.loading.conftest.state` at default@1."""
    made = small(faults)
    made.save(state(), step=1)
    return made
