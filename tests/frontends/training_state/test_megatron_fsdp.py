"""Megatron-FSDP: every strategy saves and loads exactly the state of an unsharded training run.

It runs on CPUs with stubs for CUDA, see `tests.support.megatron_fsdp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import (
    load_model_and_optim_state,
    save_model_and_optim_state,
    unshard_model_state,
    unshard_optim_state,
)
from tests.support.dcp import load, save
from tests.support.megatron_fsdp import STRATEGIES, gathered, megatron_fsdp, without_cuda
from tests.support.parallel import Stack, adamw, everything, fsdp2, step
from tests.support.ranks import Pool, outcome_of
from tests.support.training import identical

# an import would find Megatron-core, see `without_cuda`
pytestmark = pytest.mark.skipif(find_spec("megatron_fsdp") is None, reason="needs megatron-fsdp")

UNITS = (nn.Sequential, nn.LayerNorm)
MOMENTS = ("exp_avg", "exp_avg_sq")
WAYS = [(strategy, overlap) for strategy in STRATEGIES for overlap in (True, False)]


def stack(seed: int, dtype: torch.dtype = torch.float32) -> Stack:
    """Return a model with odd sizes, tied weights and buffers. All of its parameters are trained."""
    model = Stack(seed, 1).to(dtype)
    model.frozen.requires_grad_(True)  # Megatron-FSDP trains frozen parameters under some strategies only
    return model


def sharded(seed: int, strategy: str, *, overlap: bool = True, **options: Any) -> tuple[Any, Optimizer]:
    """Shard a model over all ranks. ``overlap``: gather parameters in each forward pass."""
    return megatron_fsdp(stack(seed), adamw, strategy, units=UNITS, overlap_param_gather=overlap, **options)


def forward(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(torch.randn(5, 6, generator=torch.Generator().manual_seed(7)))
    return found.detach().clone()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole weights by plain name, gathered without casckpt."""
    return {name.removeprefix("module."): gathered(value) for name, value in model.state_dict().items()}


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the whole moments by plain name. A rank that has no elements of a parameter has no state for it."""
    found = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty_like(parameter[:0] if not isinstance(parameter, DTensor) else parameter)
        state = optimizer.state.get(parameter, dict.fromkeys(MOMENTS, empty))
        found[name.removeprefix("module.")] = {what: gathered(state[what]) for what in MOMENTS}
    return found


class Reference:
    """The weights and moments of an unsharded training run, which is saved as plain@1."""

    def __init__(self, path: Path) -> None:
        self.weights = unshard_model_state(path, "plain@1", no_dist=True)
        state = unshard_optim_state(path, "plain@1", by_name=True, no_dist=True)["state"]
        self.moments = {name: {what: own[what] for what in MOMENTS} for name, own in state.items()}
        self.steps = {name: own["step"] for name, own in state.items()}

    def forward(self) -> torch.Tensor:
        model = stack(9)
        model.load_state_dict(self.weights)
        return forward(model)

    def check(self, model: Any, optimizer: Optimizer) -> None:
        """Check a model that has loaded the reference."""
        assert identical(weights(model), self.weights)
        found = moments(model, optimizer)
        assert identical(found, {name: self.moments[name] for name in found})
        steps = [float(state["step"]) for state in optimizer.state.values()]
        assert steps == [3.0] * len(steps)
        assert identical(forward(model), self.forward())


def train_unsharded(path: Path) -> None:
    model = stack(1)
    optimizer = adamw(model.parameters())
    step(model, optimizer, range(3))
    save_model_and_optim_state(path, model, optimizer, run="plain", step=1)


def is_reference(path: Path, ref: str) -> bool:
    """Report whether a checkpoint has the values of the unsharded training run."""
    return identical(*(
        [unshard_model_state(path, one), dict(sorted(unshard_optim_state(path, one, by_name=True)["state"].items()))]
        for one in (ref, "plain@1")
    ))  # fmt: skip


def loaded(rank: int, size: int, path: Path, ways: Sequence[tuple[str, bool]]) -> None:
    """Load the unsharded state with each strategy into a model that has been trained, and save it again."""
    expected = Reference(path)
    with without_cuda():
        for strategy, overlap in ways:
            model, optimizer = sharded(2, strategy, overlap=overlap)
            step(model, optimizer, range(2))
            forward(model)  # gathers parameters
            load_model_and_optim_state(path, "plain@1", model, optimizer)
            expected.check(model, optimizer)
            save_model_and_optim_state(path, model, optimizer, run=f"{strategy}-{overlap}", step=size)


@pytest.mark.parametrize(
    ("size", "ways"), [(2, WAYS), pytest.param(4, [(one, False) for one in STRATEGIES], marks=pytest.mark.soak)]
)
def test_every_strategy_loads_and_saves_the_state_of_an_unsharded_training_run(
    tmp_path: Path, ranks: Pool, size: int, ways: list[tuple[str, bool]], full: bool
) -> None:
    ways = ways if full else ways[::4] + ways[3::4]
    train_unsharded(tmp_path)
    ranks.run(size, loaded, tmp_path, ways)
    assert all(is_reference(tmp_path, f"{strategy}-{overlap}@{size}") for strategy, overlap in ways)


def trained(rank: int, size: int, path: Path, strategies: Sequence[str]) -> dict[str, Any]:
    """Train with each strategy, and save in the background. Return the whole weights and moments of the save."""
    found = {}
    with without_cuda():
        for strategy in strategies:
            model, optimizer = sharded(1, strategy)
            step(model, optimizer, range(2))
            found[strategy] = weights(model), moments(model, optimizer)
            with Checkpointer(path, run=strategy) as checkpointer:
                checkpointer.save_async(2, model, optimizer)
                step(model, optimizer, [5])
    return found


def continued(rank: int, size: int, path: Path, expected: dict[str, Any], suffix: str = "") -> None:
    """Load the checkpoint of each strategy with a different one, train, and save."""
    with without_cuda():
        for strategy, values in expected.items():
            model, optimizer = sharded(3, STRATEGIES[STRATEGIES.index(strategy) - 1])
            load_model_and_optim_state(path, f"{strategy}{suffix}@2", model, optimizer)
            assert identical((weights(model), moments(model, optimizer)), values)
            step(model, optimizer, [5])
            save_model_and_optim_state(path, model, optimizer, run=f"{strategy}{suffix}-later", step=size)


def through_fsdp2(rank: int, size: int, path: Path, expected: dict[str, Any]) -> None:
    """Load the checkpoint of each strategy with FSDP2, and save it again."""
    for strategy, (whole, of_optimizer) in expected.items():
        model = fsdp2(stack(4))
        optimizer = adamw(model.parameters())
        load_model_and_optim_state(path, f"{strategy}@2", model, optimizer)
        found = everything(model, optimizer)
        assert identical(found.model, dict(sorted(whole.items())))
        assert all(
            identical(found.state[name][what], value)
            for name, own in of_optimizer.items()
            for what, value in own.items()
        )
        save_model_and_optim_state(path, model, optimizer, run=f"{strategy}-fsdp2", step=2)


def test_checkpoints_load_on_other_numbers_of_ranks_and_with_fsdp2(tmp_path: Path, ranks: Pool, full: bool) -> None:
    strategies = STRATEGIES if full else STRATEGIES[-1:]  # the test above loads and saves with all of them
    expected = ranks.run(2, trained, tmp_path, strategies)[0]
    for size in (4, 1) if full else (3,):
        ranks.run(size, continued, tmp_path, expected)
        for strategy in strategies:  # a rank without elements of a parameter does not count its steps
            state = unshard_optim_state(tmp_path, f"{strategy}-later@{size}", by_name=True)["state"]
            assert {float(own["step"]) for own in state.values()} == {4.0}
    ranks.run(3 if full else 2, through_fsdp2, tmp_path, expected)
    ranks.run(4 if full else 2, continued, tmp_path, expected, "-fsdp2")


def weights_of_columns(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole weights on the mesh (fsdp=2, tp=2). Parameters without tensor parallelism are in each column."""
    found = {}
    for name, value in model.state_dict().items():
        parts: list[Any] = [None] * 4
        dist.all_gather_object(parts, (value.to_local() if isinstance(value, DTensor) else value).detach().clone())
        if isinstance(value, DTensor):
            own = [parts[0], parts[2], parts[1], parts[3]][: 2 * value.device_mesh.ndim]
            parts = [torch.cat([part.view(-1) for part in own]).view(value.shape)]
        found[name.removeprefix("module.")] = parts[0]
    return found


def on_mesh(rank: int, size: int, path: Path, kind: str) -> None:
    """Load the unsharded state on a mesh with two dimensions, and save it again."""
    with without_cuda():
        model, options = stack(2), dict[str, Any]()
        if kind == "tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
            parallelize_module(model, mesh["tp"], {"up.0": ColwiseParallel(output_layouts=Replicate())})
        else:
            mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "fsdp", "tp"))
            both = mesh["outer", "fsdp"]._flatten("both").get_group()
            options = {"dp_outer_dim": "outer", "hybrid_fsdp_group": both, "outer_dp_sharding_strategy": kind}
        model, optimizer = megatron_fsdp(model, adamw, "optim_grads_params", units=UNITS, device_mesh=mesh, **options)
        step(model, optimizer, range(2))
        load_model_and_optim_state(path, "plain@1", model, optimizer)
        expected = Reference(path)
        if kind == "tp":  # a CPU may multiply half a matrix in another order, which changes the last bits of a forward
            assert identical(weights_of_columns(model), expected.weights)
        else:
            assert identical(forward(model), expected.forward())
        save_model_and_optim_state(path, model, optimizer, run=kind, step=1)


@pytest.mark.parametrize("kind", ["tp", pytest.param("no_shard", marks=pytest.mark.soak), "optim"])
def test_hybrid_and_tensor_parallel_meshes_load_and_save(tmp_path: Path, ranks: Pool, kind: str) -> None:
    if kind == "optim":
        pytest.importorskip("einops", reason="Megatron-FSDP needs it")
    train_unsharded(tmp_path)
    ranks.run(4, on_mesh, tmp_path, kind)
    assert is_reference(tmp_path, f"{kind}@1")


def in_low_precision(rank: int, size: int, path: Path, ways: Sequence[tuple[str, bool]]) -> None:
    """Train in bfloat16 with main weights in float32. Compare forward passes before a save and after a load."""
    with without_cuda():
        for strategy, overlap in ways:
            models, x = [], torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
            for seed in (1, 2):
                torch.manual_seed(seed)
                model, optimizer = megatron_fsdp(
                    nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)).bfloat16(), adamw, strategy,
                    overlap_param_gather=overlap,
                )  # fmt: skip
                model(x).float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                model.start_param_sync(force_sync=True)
                models.append((model, optimizer))
            run = f"{strategy}-{overlap}"
            save_model_and_optim_state(path, *models[0], run=run, step=1)
            assert casckpt.open(path).get(f"{run}@1").tensors["model.0.weight"].dtype == "float32"
            load_model_and_optim_state(path, f"{run}@1", *models[1])
            before, after = (model(x).detach().clone() for model, _ in models)
            assert identical(before, after)


def test_a_model_in_low_precision_computes_the_same_values_after_a_load(
    tmp_path: Path, ranks: Pool, full: bool
) -> None:
    ranks.run(2, in_low_precision, tmp_path, WAYS if full else WAYS[::7])


def between_passes(rank: int, size: int, path: Path) -> None:
    """Save a dict of models right after a forward pass, in which the model has its whole parameters."""
    with without_cuda():
        model, optimizer = sharded(1, "optim_grads_params")
        step(model, optimizer, range(2))
        expected = weights(model), moments(model, optimizer)
        forward(model)
        with Checkpointer(path, run="a") as checkpointer:
            checkpointer.save(1, {"net": model}, optimizer)
        forward(model)
        fresh, other = sharded(2, "optim_grads_params")
        forward(fresh)
        with Checkpointer(path, run="a") as checkpointer:
            checkpointer.load("a@1", {"net": fresh}, other)
        assert identical((weights(fresh), moments(fresh, other)), expected)


def test_a_save_after_a_forward_pass_saves_the_sharded_parameters(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(2, between_passes, tmp_path)


def frozen(rank: int, size: int, path: Path) -> None:
    with without_cuda():
        for strategy in ("no_shard", "optim_grads_params"):
            model, optimizer = megatron_fsdp(Stack(1, 1), adamw, strategy, units=UNITS)
            step(model, optimizer, [0])
            save_model_and_optim_state(path, model, optimizer, run=strategy, step=1)
            fresh, other = megatron_fsdp(Stack(2, 1), adamw, strategy, units=UNITS)
            load_model_and_optim_state(path, f"{strategy}@1", fresh, other)
            assert identical(weights(fresh), weights(model))
            assert identical(moments(fresh, other), moments(model, optimizer))


def test_frozen_parameters_are_saved_and_loaded(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(2, frozen, tmp_path)


def undescribed(rank: int, size: int, path: Path) -> list[Any]:
    """Save and load a model whose state_dict does not describe its uneven parts."""
    with without_cuda():
        model, optimizer = sharded(1, "optim_grads_params", preproc_state_dict_for_dcp_ckpt=False)
        saved = outcome_of(lambda: save_model_and_optim_state(path, model, optimizer, run="a", step=1))
        return [saved, outcome_of(lambda: load_model_and_optim_state(path, "plain@1", model, optimizer))]


def test_uneven_parts_without_a_description_are_rejected(tmp_path: Path, ranks: Pool) -> None:
    train_unsharded(tmp_path)
    for errors in ranks.run(2, undescribed, tmp_path):
        assert all(isinstance(error, InvalidInput) for error in errors)
        assert all("cannot tell which elements these are" in str(error) for error in errors)


def through_dcp(rank: int, size: int, path: Path, *, saves: bool) -> None:
    """Save the unsharded state through DCP, or load it through DCP."""
    with without_cuda():
        model, optimizer = sharded(2, "optim_grads_params")
        if saves:
            load_model_and_optim_state(path, "plain@1", model, optimizer)
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        if saves:
            save(state, StorageWriter(path, run="dcp", step=1))
            return
        load(state, StorageReader(path, "dcp@1"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        Reference(path).check(model, optimizer)


def test_dcp_saves_and_loads_on_other_numbers_of_ranks(tmp_path: Path, ranks: Pool, full: bool) -> None:
    train_unsharded(tmp_path)
    ranks.run(2, through_dcp, tmp_path, saves=True)
    for size in (2, 4) if full else (3,):
        ranks.run(size, through_dcp, tmp_path, saves=False)
