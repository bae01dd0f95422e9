"""Fixtures that several test modules in this folder share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.frontends.megatron import LocalNonpersistentObject, ShardedObject, ShardedTensor, save


def numbered(key: str, *shape: int, **more: Any) -> ShardedTensor:
    data = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return ShardedTensor.from_rank_offsets(key, data, **more)


def obj(key: str, at: int = 0, of: int = 1, data: Any = None) -> ShardedObject:
    return ShardedObject(key, data, (of,), (at,))


@pytest.fixture
def where(tmp_path: Path) -> str:
    place = f"{tmp_path}#a@1"
    save(
        {
            "model": {"w": numbered("w", 4, 3), "b": numbered("b", 4)},
            "objects": [obj("o", 0, 2, {"t": torch.ones(2), "e": {}}), obj("o", 1, 2, "second")],
            "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
            "groups": [{"lr": 1.0, "params": LocalNonpersistentObject([0])}],
            "seed": torch.tensor([5]),
            "empty": {"dict": {}, "list": []},
        },
        place,
        content_metadata={"version": 2, "dp_cp_group": object()},
    )
    return place
