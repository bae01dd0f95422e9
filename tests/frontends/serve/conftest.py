"""Fixtures that several test modules in this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
from casckpt.store.store import Store
from tests.support.saves import small
from tests.support.serving import Served, serving


@pytest.fixture(scope="module")
def small_store() -> Store:
    store = small()
    files = {"config.json": b'{"a": 1}', "sub/x.bin": bytes(100), "empty": b""}
    store.save({"model": {"w": torch.arange(200_000)}}, run="sft", step=1, attachments=files)
    store.save({"model": {"w": torch.arange(9)}}, run="exp/a/b", step=1)
    store.save({"model": {"w": torch.ones(9, dtype=torch.complex128)}}, run="odd", step=1)
    return store


@pytest.fixture(scope="module")
def served(small_store: Store) -> Iterator[Served]:
    with serving(small_store) as found:
        yield found
