"""Parts of a checkpoint without a sharded state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.frontends import megatron
from casckpt.frontends.megatron import (
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
)
from tests.support.megatron_state import COMMON


def numbered(key: str, *shape: int, **more: Any) -> ShardedTensor:
    data = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return ShardedTensor.from_rank_offsets(key, data, **more)


def obj(key: str, at: int = 0, of: int = 1, data: Any = None) -> ShardedObject:
    return ShardedObject(key, data, (of,), (at,))


def test_parts_of_a_checkpoint_can_be_loaded(where: str) -> None:
    assert megatron.diff(load_common_state_dict(where), COMMON) == ([], [], [])
    plain = load_plain_tensors(where)
    assert {key: value.shape for key, value in plain.items()} == {"w": (4, 3), "b": (4,)}
    assert plain["w"].flatten().tolist() == list(range(12))
    metadata = load_tensors_metadata(where)
    assert metadata["w"] == ShardedTensor.from_rank_offsets("w", torch.ones(4, 3)).without_data()
    assert set(load_sharded_metadata(where)) == {"w", "b", "o/shard_0_2", "o/shard_1_2"}
    assert load_content_metadata(where) == {"version": 2}
    assert load_content_metadata(preloaded_state_dict={}) is None
    with pytest.raises(ValueError, match="give a checkpoint_dir"):
        load_content_metadata()


def test_an_empty_state_dict_loads_the_common_part(where: str, caplog: pytest.LogCaptureFixture) -> None:
    assert megatron.diff(load({}, where), COMMON) == ([], [], [])
    assert not [record for record in caplog.records if record.name.startswith("casckpt")]  # what is left is meant
