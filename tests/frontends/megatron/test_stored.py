"""Every front end loads the checkpoints of every other front end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import casckpt
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
    save,
)
from tests.support.gpt import COMMON
from tests.support.ranks import Pool
from tests.support.torch_versions import needs_torch

alone = pytest.mark.filterwarnings("ignore:torch.distributed is")  # DCP warns in a single process
WEIGHT = torch.arange(24.0).view(4, 6)


def columns(rank: int, size: int, where: str) -> None:
    part = ShardedTensor.from_rank_offsets("model.w", WEIGHT.chunk(size, 1)[rank].clone(), (1, rank, size))
    flat = ShardedTensor.from_rank_offsets_flat(
        "optim.m",
        WEIGHT.flatten()[12 * rank : 12 * rank + 12],
        (4, 6),
        flattened_range=slice(12 * rank, 12 * rank + 12),
    )
    save({"w": part, "m": flat, "step": 5}, where)


@pytest.fixture
def store(tmp_path: Path, ranks: Pool) -> casckpt.Store:
    """A store with a checkpoint that two ranks saved in Megatron style."""
    ranks.run(2, columns, f"{tmp_path}#a@5")
    return casckpt.open(tmp_path)


def test_the_native_api_reads_a_megatron_checkpoint(store: casckpt.Store) -> None:
    full = store.read("a@5")
    assert torch.equal(full["model.w"], WEIGHT)
    assert torch.equal(full["optim.m"], WEIGHT)
    assert full["step"] == 5
    assert set(store.get("a@5").tensors) == {"model.w", "optim.m"}
    state: dict[str, Any] = {"model": {"w": torch.zeros(4, 6)}, "step": None}
    store.load(state, "a@5")
    assert torch.equal(state["model"]["w"], WEIGHT)
    assert state["step"] == 5


@alone
@needs_torch("2.7", "no_dist")
def test_dcp_loads_a_megatron_checkpoint(store: casckpt.Store) -> None:
    from casckpt.frontends.dcp import StorageReader

    state = {"model": {"w": torch.zeros(4, 6)}, "optim.m": torch.zeros(4, 6), "step": 0}
    dcp_load(state, storage_reader=StorageReader(store, "a@5"), no_dist=True)
    assert torch.equal(torch.as_tensor(state["optim.m"]), WEIGHT)
    assert state["step"] == 5


def test_megatron_loads_checkpoints_from_the_native_api(tmp_path: Path) -> None:
    state = {"model": {"w": WEIGHT, "layers": [WEIGHT, 5]}, "rng": (1, 2), "n": {"a": None}, "e": {}}
    casckpt.open(tmp_path).save(state, run="a", step=1)
    rows = ShardedTensor.from_rank_offsets("model.w", torch.zeros(2, 6), (0, 1, 2))
    asked = {"w": rows, "o": ShardedObject("rng", None, (1,), (0,))}
    found = load(asked, f"{tmp_path}#a@1", validate_access_integrity=False)
    assert torch.equal(found.pop("w"), WEIGHT[2:])
    assert found == {"o": (1, 2), "model": {"layers": {1: 5}}, "rng": (1, 2), "n": {"a": None}, "e": {}}
    assert set(megatron.load_plain_tensors(f"{tmp_path}#a@1")) == {"model.w", "model.layers.0"}


@alone
@needs_torch("2.7", "no_dist")
def test_megatron_loads_checkpoints_from_dcp(tmp_path: Path) -> None:
    from casckpt.frontends.dcp import StorageWriter

    state = {"model": {"w": WEIGHT.clone()}, "step": 5}
    dcp_save(state, storage_writer=StorageWriter(casckpt.open(tmp_path), run="a", step=1), no_dist=True)
    found = load({"w": ShardedTensor.from_rank_offsets("model.w", torch.zeros(4, 6))}, f"{tmp_path}#a@1")
    assert torch.equal(found["w"], WEIGHT)


def test_megatron_loads_a_model_and_its_optimizer_by_name(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optim.step()
    casckpt.save_model_and_optim_state(tmp_path, model, optim, run="a", step=1)
    asked = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(4, 6))
        for key in ("weight", "optimizer.state.exp_avg.weight")
    }
    found, missing, unexpected = load(asked, f"{tmp_path}#a@1", strict="return_all")
    assert torch.equal(found["weight"], model.weight)
    assert torch.equal(found["optimizer.state.exp_avg.weight"], optim.state[model.weight]["exp_avg"])
    assert unexpected == set()
    assert "model.bias" in missing


def test_saving_the_same_state_through_a_different_api_writes_nothing(store: casckpt.Store) -> None:
    again = store.save({"model": {"w": WEIGHT}, "optim": {"m": WEIGHT}}, run="a", step=6)
    assert again.stats.bytes_written == 0


def test_a_model_and_its_optimizer_load_by_the_keys_of_the_native_api(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optim = trained()
    groups = [{"lr": 0.5, "betas": (0.9, 0.999), "params": [name for name, _ in model.named_parameters()]}]
    state: dict[str, Any] = {"optim": {"param_groups": groups}}
    for name, param in model.named_parameters():
        state[name] = ShardedTensor.from_rank_offsets(f"model.{name}", param)
        for what, value in optim.state[param].items():
            state[f"{name} {what}"] = ShardedTensor.from_rank_offsets(f"optim.state.{name}.{what}", value)
    save(state, f"{tmp_path}#a@1")

    other, fresh = trained()
    casckpt.load_model_and_optim_state(tmp_path, "a@1", other, fresh)
    for mine, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, loaded)
        assert optim.state[mine].keys() == fresh.state[loaded].keys()
        assert all(torch.equal(value, fresh.state[loaded][what]) for what, value in optim.state[mine].items())
    assert fresh.param_groups[0]["lr"] == 0.5


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, 6)).sum().backward()
    optim.step()
    return model, optim


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
    with pytest.raises(ValueError, match="pass a checkpoint_dir"):
        load_content_metadata()


def test_an_empty_state_dict_loads_the_common_part(where: str, caplog: pytest.LogCaptureFixture) -> None:
    assert megatron.diff(load({}, where), COMMON) == ([], [], [])
    # the loads reported the values that they did not read
    assert not [record for record in caplog.records if record.name.startswith("casckpt")]
