"""The config of a checkpoint is written and read, and an invalid one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Conflict, InvalidInput
from casckpt.frontends import megatron
from casckpt.frontends.megatron import (
    CheckpointingConfig,
    CheckpointingException,
    ShardedTensor,
    check_is_distributed_checkpoint,
    load,
    load_plain_tensors,
    maybe_load_config,
    save,
    save_config,
)
from tests.support.megatron_core import core


def state() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}


def test_a_checkpoint_contains_the_config_of_its_save(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@3"
    assert maybe_load_config(where) is None
    save(state(), where)
    assert maybe_load_config(where) == CheckpointingConfig("casckpt", 1, "torch", 1)
    assert maybe_load_config(f"{tmp_path}#a@4") is None
    assert check_is_distributed_checkpoint(f"{tmp_path}#a@4") is False


def test_a_config_has_the_fields_that_megatron_defines() -> None:
    config = CheckpointingConfig("torch_dist")
    assert (config.sharded_backend, config.sharded_backend_version) == ("torch_dist", 1)
    assert (config.common_backend, config.common_backend_version) == ("torch", 1)
    assert CheckpointingConfig("a", 2, "b", 3) == CheckpointingConfig(
        common_backend_version=3, common_backend="b", sharded_backend_version=2, sharded_backend="a"
    )


@pytest.mark.parametrize(
    "data",
    [b"{", b"\xff", b"[]", b"5", b"{}", b'{"sharded_backend": 1}', b'{"sharded_backend": "x", "common_backend": 1}'],
)
def test_an_invalid_config_is_rejected(tmp_path: Path, data: bytes) -> None:
    casckpt.open(tmp_path / "s").save({}, run="a", step=3, attachments={"metadata.json": data})
    (tmp_path / "metadata.json").write_bytes(data)
    for where in (f"{tmp_path}/s#a@3", tmp_path):
        assert check_is_distributed_checkpoint(where) is False
        assert maybe_load_config(where) is None


def test_unknown_fields_of_a_config_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "later": 1}))
    assert maybe_load_config(tmp_path) == CheckpointingConfig("torch_dist")
    assert maybe_load_config(tmp_path / "nowhere") is None
    assert maybe_load_config(tmp_path / "metadata.json") is None
    (tmp_path / "odd/metadata.json").mkdir(parents=True)
    assert check_is_distributed_checkpoint(tmp_path / "odd") is False


def test_a_config_that_was_written_is_read_back(tmp_path: Path) -> None:
    config = CheckpointingConfig("other", 2)
    save_config(config, tmp_path)
    assert maybe_load_config(str(tmp_path)) == config
    where = f"{tmp_path}/s#a@3"
    save_config(config, where)
    save_config(CheckpointingConfig("another"), where)
    assert maybe_load_config(where) == CheckpointingConfig("another")
    save(state(), where)
    assert maybe_load_config(where) == CheckpointingConfig("casckpt")
    assert load_plain_tensors(where).keys() == {"w"}


def test_the_config_of_a_checkpoint_never_changes(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@3"
    save(state(), where)
    save_config(CheckpointingConfig("casckpt"), where)
    with pytest.raises(Conflict, match="never changes"):
        save_config(CheckpointingConfig("casckpt", 2), where)


def test_strategies_other_than_casckpt_are_rejected(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@3"
    calls: tuple[Any, ...] = (save, load)
    for call in calls:
        with pytest.raises(InvalidInput, match="torch_dist"):
            call(state(), where, ("torch_dist", 1))
        with pytest.raises(NotImplementedError):
            call(state(), where, None, ("torch", 1))
    save(state(), where, ("casckpt", 1))


def test_a_strategy_object_is_rejected_outside_megatron(tmp_path: Path) -> None:
    core()
    calls: list[tuple[Any, Any]] = [
        (save, megatron.CasSaveShardedStrategy(tmp_path, run="a")),
        (load, megatron.CasLoadShardedStrategy()),
    ]
    for call, strategy in calls:
        name = type(strategy).__name__
        with pytest.raises(CheckpointingException, match=f"a {name} works only with Megatron-core's own save and load"):
            call(state(), f"{tmp_path}#a@3", strategy)
