"""Optimizer state with the sharding of its parameters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casckpt.frontends.megatron import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    load,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
    save,
)

if TYPE_CHECKING:
    from tests.support.ranks import Pool


def halves(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
    parts = enumerate(data.chunk(2))
    return {half: ShardedTensor.from_rank_offsets(f"{key}.{half}", part, replica_id=replica_id) for half, part in parts}


def merged(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parts[0], parts[1]])


def sharded(model: nn.Module) -> dict[str, Any]:
    """Whole weights, and the bias in two halves."""
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name.endswith("bias"):
            state[name] = ShardedTensorFactory(name, value, halves, merged)
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, value, (0, 0, 1))
    return state


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).to(torch.bfloat16)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optim.step()
    return model, optim


def test_parameters_are_numbered_and_tied_ones_share_a_number() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert get_optim_param_to_id_map([a, b, a]) == {id(a): 0, id(b): 1}


def test_parameters_are_found_by_identity() -> None:
    model, _ = trained()
    found = get_param_id_to_sharded_param_map(sharded(model), model.parameters())
    assert [value.key for _, value in sorted(found.items())] == ["weight", "bias"]


def test_a_state_dict_without_parameters_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = trained()
    copies = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4, 3))}
    with caplog.at_level(logging.WARNING):
        assert get_param_id_to_sharded_param_map(copies, model.parameters()) == {}
    assert "keep_vars=True" in caplog.text


def test_state_with_the_wrong_shape_is_rejected() -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.ones(2, 2), (0, 1, 2), replica_id=3)
    made = make_sharded_optimizer_tensor(param, torch.ones(2, 2, dtype=torch.float64), "optim.exp_avg")
    assert (made.key, made.dtype, made.global_offset, made.replica_id) == ("optim.exp_avg.w", torch.float64, (2, 0), 3)
    with pytest.raises(CheckpointingException, match=r"'p.w' has shape \[\].*exclude_keys"):
        make_sharded_optimizer_tensor(param, torch.tensor(1.0), "p")


def test_a_whole_optimizer_is_saved_and_loaded(tmp_path: Path) -> None:
    model, optim = trained()
    numbers = get_param_id_to_sharded_param_map(sharded(model), model.parameters())
    state = optim.state_dict()
    groups = state["param_groups"]
    optim_state_to_sharding_state(state, numbers, exclude_keys=("step",))
    assert isinstance(state["param_groups"][0]["params"], LocalNonpersistentObject)
    assert groups[0]["params"] == [0, 1]
    save({"optimizer": state}, f"{tmp_path}#o@1")

    fresh = torch.optim.AdamW(model.parameters()).state_dict()
    fresh["state"] = {n: {k: torch.zeros_like(v) for k, v in s.items()} for n, s in optim.state_dict()["state"].items()}
    optim_state_to_sharding_state(fresh, numbers, exclude_keys=("step",))
    found = load({"optimizer": fresh}, f"{tmp_path}#o@1")["optimizer"]
    assert found["param_groups"] == groups
    for number, values in optim.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found["state"][number][name], values[name])


def test_state_of_an_unknown_parameter_is_rejected() -> None:
    state: dict[str, Any] = {"state": {5: {"m": torch.ones(1)}}, "param_groups": []}
    with pytest.raises(ValueError, match="parameter 5"):
        optim_state_to_sharding_state(state, {})
    optim_state_to_sharding_state(state, {}, exclude_keys=("m",))
    assert state["state"] == {5: {}}


def numbered_dtensors(rank: int, size: int) -> tuple[list[int], dict[int, str]]:
    mesh = init_device_mesh("cpu", (size,))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])) for _ in range(3)]
    data: list[Any] = [param if rank else param.to_local() for param in params]  # type: ignore[attr-defined] # DTensors
    model = [ShardedTensor.from_rank_offsets(f"p{i}", value, (0, rank, size)) for i, value in enumerate(data)]
    found = get_param_id_to_sharded_param_map(model, params)
    return list(get_optim_param_to_id_map(params).values()), {number: one.key for number, one in found.items()}


def test_dtensor_parameters_are_matched_by_their_local_part(ranks: Pool) -> None:
    assert ranks.run(2, numbered_dtensors) == [([0, 1, 2], {0: "p0", 1: "p1", 2: "p2"})] * 2
