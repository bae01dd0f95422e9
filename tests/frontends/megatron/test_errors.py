"""Each error is an instance of both Megatron's and casckpt's error classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.errors import Conflict, NotFound
from casckpt.frontends.megatron import CheckpointingException, ShardedTensor, load, save


def state() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}


def test_errors_are_also_casckpt_errors(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@3"
    with pytest.raises(CheckpointingException) as absent:
        load(state(), where)
    assert isinstance(absent.value, NotFound)
    assert absent.value.exit_status == 3
    save(state(), where)
    with pytest.raises(CheckpointingException, match="already exists") as twice:
        save(state(), where)
    assert isinstance(twice.value, Conflict)
    save(state(), where, overwrite=True)
