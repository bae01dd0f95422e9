"""Some of a checkpoint's sharded tensors are removed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import casckpt
from casckpt.errors import NotFound
from casckpt.frontends import megatron
from tests.support.megatron_core import core
from tests.support.ranks import Pool


def tensor(key: str, number: float) -> megatron.ShardedTensor:
    return megatron.ShardedTensor.from_rank_offsets(key, torch.full((3, 2), number))


def state() -> dict[str, Any]:
    return {
        "model": {"w": tensor("w", 1), "b": tensor("opt", 2)},
        "optimizer": [tensor("optimizer.exp_avg.w", 3), tensor("optimizer.exp_avg.b", 4)],
        "objects": [megatron.ShardedObject("rng", {"s": torch.ones(2)}, (1,), (0,)),
                    megatron.ShardedObject("optimizer.rng", {"s": torch.ones(2)}, (1,), (0,))],
        "optimizer.lr": 0.1,
        "args": Namespace(betas=(0.9, 0.99)),
        "seed": torch.tensor(5),
    }  # fmt: skip


def test_keys_with_a_prefix_are_removed(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@1"
    megatron.save(state(), where, attachments={"mine": b"1"}, metadata={"loss": 2})
    common = megatron.load_common_state_dict(where)
    megatron.remove_sharded_tensors(where, "optimizer.")
    assert set(megatron.load_sharded_metadata(where)) == {"w", "opt", "rng/shard_0_1"}
    assert megatron.diff(megatron.load_common_state_dict(where), common) == ([], [], [])
    kept = {"x": tensor("w", 0), "y": megatron.ShardedObject("rng", None, (1,), (0,))}
    found = megatron.load(kept, where)
    assert (found["x"].unique().tolist(), found["y"]["s"].tolist()) == ([1], [1, 1])
    store = casckpt.open(tmp_path)
    (checkpoint,) = store.checkpoints()
    assert (checkpoint.metadata, store.read_attachment(checkpoint, "mine")) == ({"loss": 2}, b"1")
    assert checkpoint.stats.bytes_written == 0


def test_a_prefix_that_matches_no_key_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = f"{tmp_path}#a@1"
    with pytest.raises(NotFound):
        megatron.remove_sharded_tensors(where, "x")
    megatron.save(state(), where)
    before = casckpt.open(tmp_path).get("a@1")
    megatron.remove_sharded_tensors(where, "seed")  # it is in the common part
    assert "no sharded value whose key begins with 'seed'" in caplog.text
    assert casckpt.open(tmp_path).get("a@1") == before


def test_keys_are_removed_from_checkpoints_of_other_front_ends(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": torch.ones(2)}, "groups": [{"lr": 1}]}}
    casckpt.open(tmp_path).save(saved, run="a", step=1)
    megatron.remove_sharded_tensors(f"{tmp_path}#a@1", "optim.")
    found = casckpt.open(tmp_path).read("a@1")
    assert (found["model"]["w"].tolist(), found["optim"]["groups"]) == ([1, 1], [{"lr": 1}])
    assert not found["optim"].get("state")


def by_core(rank: int, size: int, path: Path) -> Any:
    core()
    path.joinpath("iter_4").mkdir()
    core().save(state(), str(path / "iter_4"), megatron.CasSaveShardedStrategy(path / "store", run="a"))
    megatron.CasLoadShardedStrategy().remove_sharded_tensors(path / "iter_4", "optimizer.")
    dist.barrier()
    found = core().load({"x": tensor("w", 0)}, str(path / "iter_4"), megatron.CasLoadShardedStrategy())
    return [found["x"].unique().tolist(), sorted(found)]


def test_the_folder_still_loads_after_keys_were_removed(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(1, by_core, tmp_path) == [[[1], ["args", "optimizer.lr", "seed", "x"]]]
    assert "opt" in megatron.load_tensors_metadata(f"{tmp_path}/store#a@4")
    assert "optimizer.exp_avg.w" not in megatron.load_tensors_metadata(f"{tmp_path}/store#a@4")
