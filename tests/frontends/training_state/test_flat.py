"""The training state of FSDP's flat parameters and of nested wrappers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.nn.parallel import DistributedDataParallel

from casckpt.frontends.training_state import (
    flatten_optimizer_state,
    load_model_and_optim_state,
    save_model_and_optim_state,
    unshard_model_state,
)
from casckpt.frontends.training_state.flat import flat_parts, reshard
from tests.support.parallel import (
    Blocks,
    Stack,
    as_it_is,
    build,
    by_gradients,
    compiled,
    everything,
    joined,
    local,
    offloaded,
    sharded,
    step,
    tp,
)
from tests.support.ranks import Pool, outcome_of
from tests.support.training import Network, Refusing, identical

# FSDP


def settings_of_fsdp(rank: int, size: int, path: Path) -> None:
    """Save and load under each state_dict_type and with gathered weights.

    Neither affects the result, and the setting does not change.
    """
    model, trained = build("fsdp1 SHARD_GRAD_OP", 1)
    step(model, trained, range(2))
    wanted = everything(model, trained)
    fresh, other = build("fsdp1 nested", 2, shape_seed=1)
    for number, kind in enumerate(StateDictType):
        step(fresh, other, range(number))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # state_dict_type is deprecated
            for one in (model, fresh.get_submodule("down")):
                FullyShardedDataParallel.set_state_dict_type(one, kind)
        save_model_and_optim_state(path, model, trained, run="a", step=number)
        load_model_and_optim_state(path, f"a@{number}", fresh, other)
        assert everything(fresh, other).differences(wanted) == []
        assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type == kind
    model(torch.ones(2, 6))  # without a backward, so parameters are whole tensors now
    assert not all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    save_model_and_optim_state(path, model, trained, run="a", step=9)
    step(fresh, other, range(1))
    load_model_and_optim_state(path, "a@9", fresh, other)
    assert everything(fresh, other).differences(wanted) == []


def test_checkpoints_do_not_depend_on_fsdp_settings(store_path: Path, ranks: Pool) -> None:
    ranks.run(2, settings_of_fsdp, store_path)


def looked_at(rank: int, size: int, path: Path, topology: str, grad: bool) -> list[torch.Tensor]:
    """Check that a load discards the values that an earlier forward pass gathered."""
    model, trained = build(topology, 1)
    step(model, trained, range(1))
    save_model_and_optim_state(path, model, trained, run="a", step=1)
    x = torch.ones(2, 6)
    wanted = model(x).detach()
    fresh, other = build(topology, 2, shape_seed=1)
    with torch.set_grad_enabled(grad):
        fresh(x)
    assert flatten_optimizer_state(fresh, other)["param_groups"]  # by name, so all parameters were found
    load_model_and_optim_state(path, "a@1", fresh, other)
    assert identical(fresh(x).detach(), wanted)
    step(fresh, other, range(1, 3))
    step(model, trained, range(1, 3))
    assert everything(fresh, other).differences(everything(model, trained)) == []
    return []


GATHERED = ["fsdp1 nested", "fsdp1 SHARD_GRAD_OP", "fsdp1 NO_SHARD", "fsdp1 mixed precision", "fsdp2 on 2"]


@pytest.mark.parametrize(
    ("topology", "grad"),
    [
        pytest.param(topology, grad, marks=pytest.mark.soak if grad == bool(number % 2) else ())
        for number, topology in enumerate(GATHERED)
        for grad in (False, True)
    ],
)
def test_values_gathered_by_a_forward_pass_are_not_used_after_a_load(
    store_path: Path, ranks: Pool, topology: str, grad: bool
) -> None:
    ranks.run(2, looked_at, store_path, topology, grad)


def odd_flat_parameters(rank: int, size: int, path: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallel = joined(tp(Stack(1), mesh["tensor"]), device_mesh=mesh["data"])
    image = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch accepts more types than it declares
    models = [parallel, joined(image)]
    return [str(outcome_of(partial(save_model_and_optim_state, path, model, run="a", step=1))) for model in models]


def test_flat_parameters_that_are_not_flat_ranges_are_rejected(store_path: Path, ranks: Pool) -> None:
    for parallel, image in ranks.run(4, odd_flat_parameters, store_path):
        assert "tensor-parallel" in parallel
        assert "'weight'" in image
        assert "contiguous_format" in image


# other wrappers, and nested wrappers


# (wrapper of each block, wrapper of the whole model)
WRAPS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "checkpointing, fsdp1": (lambda block: joined(checkpoint_wrapper(block)), joined),
    "fsdp1, checkpointing": (lambda block: checkpoint_wrapper(joined(block)), joined),
    "checkpointing, ddp": (checkpoint_wrapper, DistributedDataParallel),
    "checkpointing, fsdp2": (lambda block: sharded(checkpoint_wrapper(block)), sharded),
    "compile, fsdp2": (compiled, sharded),
    "fsdp2, compile": (sharded, lambda model: compiled(sharded(model))),
    "fsdp2, offloaded": (offloaded, offloaded),
    "compile, fsdp1": (as_it_is, lambda model: compiled(joined(model))),
}
"""By default, every second one."""


def wrapped(rank: int, size: int, path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        block, whole = WRAPS[name]
        model, fresh = (whole(Blocks(seed, block)) for seed in (1, 2))
        trained, other = (optim.AdamW(one.parameters(), lr=0.1) for one in (model, fresh))
        train = by_gradients if "compile" in name else step
        train(model, trained, range(2))
        save_model_and_optim_state(path, model, trained, run="a", step=number)
        load_model_and_optim_state(path, f"a@{number}", fresh, other)
        for more in (range(0), range(2, 4)):
            train(model, trained, more)
            train(fresh, other, more)
            for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
                assert identical(local(one), local(two)), name
                pieces = [
                    [local(value) for value in found.values()] for found in (trained.state[one], other.state[two])
                ]
                assert identical(*pieces), name


def test_nested_fsdp_wrappers_are_supported(store_path: Path, ranks: Pool, full: bool) -> None:
    wraps = list(WRAPS) if full else list(WRAPS)[1::2]
    ranks.run(2, wrapped, store_path, wraps)
    names = [f"{part}.0.{what}" for part in ("first", "second") for what in ("weight", "bias")]
    for number in range(len(wraps)):
        assert sorted(unshard_model_state(store_path, f"a@{number}")) == sorted(names)


# no steps


def before_the_first_step(rank: int, size: int, path: Path, topology: str) -> None:
    model, trained = build(topology, 1, Refusing)
    before = everything(model, trained)
    save_model_and_optim_state(path, model, trained, run=topology.split(maxsplit=1)[0], step=0)
    fresh, other = build(topology, 2, Refusing, shape_seed=1)
    load_model_and_optim_state(path, f"{topology.split(maxsplit=1)[0]}@0", fresh, other)
    assert everything(model, trained).differences(before) == everything(fresh, other).differences(before) == []
    assert len(trained.state) == len(other.state) == 0
    assert all(parameter.grad is None for one in (model, fresh) for parameter in one.parameters())


@pytest.mark.parametrize("topology", ["fsdp2 on 2", "fsdp1 nested", "tp"])
def test_flat_state_is_saved_before_the_first_step(store_path: Path, ranks: Pool, topology: str) -> None:
    ranks.run(2, before_the_first_step, store_path, topology)


def test_fsdp_is_detected_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert flat_parts(Network(1)) == {}
    reshard(Network(1))
