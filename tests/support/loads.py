"""A state to load while a different host changes its checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore
from tests.support.saves import cells


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
