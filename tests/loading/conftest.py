"""Fixtures that several tests of saves and loads share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.storage.local.syscalls import Lacking
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore
from tests.support.loads import state
from tests.support.reads import pages
from tests.support.repositories import memory
from tests.support.saves import small, small_folder


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
    """A store that reports itself as remote, with `tests.support.loads.state` at default@1."""
    made = small(faults)
    made.save(state(), step=1)
    return made
