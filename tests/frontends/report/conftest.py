"""Fixtures that several test modules in this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs casckpt[report]")
import casckpt
from casckpt.store.store import Store


def layers(step: int) -> dict[str, object]:
    return {"model": {"layers": {str(n): torch.full((512,), float(step * (n > 1))) for n in range(4)}}}


@pytest.fixture
def store(store_path: Path) -> Store:
    store = casckpt.open(store_path)
    for step in range(1, 5):
        store.save(layers(step), run="sft", step=step * 10)
    store.save(layers(4), run="other", step=1)
    store.tag("best", "sft@30")
    return store
