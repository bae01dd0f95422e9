"""Training resumes on different numbers of ranks, with any optimizer, and with state of any dtype and shape."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

import casckpt
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state, unshard_optim_state
from tests.support.logs import logged
from tests.support.parallel import CPU, TOPOLOGIES, Everything, Factory, Stack, adamw, build, everything, local, step
from tests.support.ranks import Pool, outcome_of
from tests.support.training import identical


def trained_on_4(rank: int, size: int, path: Path) -> Everything:
    model, trained = build("fsdp2 on 4", 1)
    step(model, trained, range(3))
    save_model_and_optim_state(path, model, trained, run="a", step=3)
    return everything(model, trained)


def resumed_on_2(rank: int, size: int, path: Path, saved: Everything) -> list[list[str]]:
    unbroken = build("fsdp2 on 2", 2, shape_seed=1)
    by_hand(*unbroken, saved)
    fresh = build("fsdp2 on 2", 3, shape_seed=1)
    load_model_and_optim_state(path, "a@3", *fresh)
    found = []
    for number in range(3, 5):
        found.append(everything(*fresh).differences(everything(*unbroken)))
        step(*unbroken, [number])
        step(*fresh, [number])
    return found


def by_hand(model: nn.Module, optimizer: Optimizer, saved: Everything) -> None:
    """Copy a saved state into a model and an optimizer without casckpt."""

    def like(parameter: DTensor, value: torch.Tensor) -> DTensor:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(saved.model.get(name, buffer))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().copy_(like(parameter, saved.model[name]).to_local())
            if name in saved.state:
                optimizer.state[parameter] = {
                    what: value.clone() if value.dim() == 0 else like(parameter, value)
                    for what, value in saved.state[name].items()
                }


def test_training_resumes_bit_for_bit_on_a_different_number_of_ranks(store_path: Path, ranks: Pool) -> None:
    saved = ranks.run(4, trained_on_4, store_path)[0]
    assert ranks.run(2, resumed_on_2, store_path, saved) == [[[]] * 2] * 2


OPTIMIZERS: dict[str, Factory] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "Adam, amsgrad": partial(optim.Adam, lr=0.1, amsgrad=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.1, fused=True),
    "AdamW, tensor lr": lambda parameters: optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False),
    "NAdam": partial(optim.NAdam, lr=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "Adafactor": partial(optim.Adafactor, lr=0.1),
}


def any_optimizer(rank: int, size: int, path: Path, topology: str, names: list[str]) -> None:
    for number, name in enumerate(names):
        model, trained = build(topology, 1, OPTIMIZERS[name])
        step(model, trained, range(2))
        save_model_and_optim_state(path, model, trained, run=topology.replace(" ", "-"), step=number)
        fresh, other = build(topology, 2, OPTIMIZERS[name], shape_seed=1)
        load_model_and_optim_state(path, f"{topology.replace(' ', '-')}@{number}", fresh, other)
        assert everything(fresh, other).differences(everything(model, trained)) == [], name
        assert list(other.state) == [p for p in fresh.parameters() if p in other.state]
        for group in (trained, other):
            for values in group.state.values():
                assert all(value.device == CPU for value in values.values() if isinstance(value, torch.Tensor))
        step(model, trained, range(2, 4))
        step(fresh, other, range(2, 4))
        assert everything(fresh, other).differences(everything(model, trained)) == [], name


UNFIT = {"fsdp2 on 2": ["Adafactor"], "tp": ["Adafactor", "AdamW, fused"], "fsdp1 nested": ["Adagrad"]}
"""torch cannot train with Adafactor or fused optimizers here. Adagrad counts steps on ranks that take none."""


@pytest.mark.parametrize("topology", UNFIT)
def test_any_optimizer_is_saved_and_loaded_on_ranks(store_path: Path, ranks: Pool, topology: str, full: bool) -> None:
    """By default, test each optimizer under one topology."""
    names = list(OPTIMIZERS) if full else list(OPTIMIZERS)[list(UNFIT).index(topology) :: len(UNFIT)]
    ranks.run(2, any_optimizer, store_path, topology, [name for name in names if name not in UNFIT[topology]])


class Odd(Optimizer):
    """An optimizer with nested state, including a list, whose dtypes and shapes differ from the parameter's."""

    def __init__(self, params: Iterable[Any], others: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self._others = others

    def step(self, closure: Any = None) -> Any:
        """Take a step without a useful effect."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._one(parameter, parameter.grad.float())

    def _one(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["mean"] = {"slow": torch.zeros_like(gradient)}
            state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state["last"] = []
            # a replicated DTensor if the parameter is a DTensor
            state["all"] = torch.zeros_like(gradient).sum().new_zeros(self._others)
            state["step"] = torch.zeros(())
        state["step"] += 1
        state["mean"]["slow"].mul_(0.9).add_(gradient, alpha=0.1)
        state["codes"].add_((gradient * 16).to(torch.uint8))
        state["last"] = [*state["last"], gradient.clone()][-2:]
        state["all"].add_(1)
        with torch.no_grad():
            change = state["mean"]["slow"] + state["last"][0] + state["codes"].float() + state["all"].sum()
            parameter.sub_(change.to(parameter.dtype), alpha=0.01)


def odd_state(rank: int, size: int, path: Path, topology: str) -> None:
    def make(seed: int) -> tuple[nn.Module, Optimizer]:
        model = TOPOLOGIES[topology][1](Stack(seed, 1).to(torch.bfloat16))
        return model, Odd(model.parameters(), 1 if "fsdp1" in topology else 23)

    def train(model: nn.Module, trained: Optimizer, steps: range) -> None:
        for number in steps:
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
            trained.zero_grad()
            model(x).float().square().sum().backward()
            trained.step()

    model, trained = make(1)
    train(model, trained, range(3))
    save_model_and_optim_state(path, model, trained, run=topology.split(maxsplit=1)[0], step=3)
    fresh, other = make(2)
    for _ in range(2):  # first into missing state, then into existing state
        load_model_and_optim_state(path, f"{topology.split(maxsplit=1)[0]}@3", fresh, other)
        assert same_state(trained, other)
        train(fresh, other, range(3, 4))
    train(model, trained, range(3, 4))
    assert same_state(trained, other)
    assert identical([local(p) for p in model.parameters()], [local(p) for p in fresh.parameters()])


def same_state(one: Optimizer, other: Optimizer) -> bool:
    """Return whether the state on this rank is equal and has the same kinds of tensors."""

    def seen(optimizer: Optimizer) -> Any:
        found: list[Any] = []
        for state in optimizer.state.values():
            for value in (state["mean"]["slow"], state["codes"], *state["last"], state["all"], state["step"]):
                placements = [str(placement) for placement in value.placements] if isinstance(value, DTensor) else []
                found.append((tuple(value.shape), placements, local(value)))
        return found

    return identical(seen(one), seen(other))


@pytest.mark.parametrize("topology", ["ddp", "fsdp2 on 3", "fsdp1 on 3"])
def test_state_with_different_dtypes_and_shapes_is_sharded(store_path: Path, ranks: Pool, topology: str) -> None:
    ranks.run(3, odd_state, store_path, topology)


def stale_steps(rank: int, size: int, path: Path, factory: Factory) -> list[float]:
    """Return step counts, which ranks without elements of a parameter must not affect."""
    model, trained = build("fsdp1", 1, factory)
    step(model, trained, range(2))
    save_model_and_optim_state(path, model, trained, run="a", step=2)
    fresh, other = build("fsdp1", 2, factory, shape_seed=1)
    load_model_and_optim_state(path, "a@2", fresh, other)
    assert all(parameter.numel() for parameter in other.state)
    step(fresh, other, range(2, 5))
    save_model_and_optim_state(path, fresh, other, run="a", step=5)
    state = unshard_optim_state(path, "a@5", by_name=True)["state"]
    return sorted({float(values["step"]) for name, values in state.items() if "frozen" not in name})


@pytest.mark.parametrize("factory", [adamw, optim.Adagrad])  # Adagrad has state before the first step
def test_only_ranks_that_perform_steps_save_step_counts(store_path: Path, ranks: Pool, factory: Factory) -> None:
    assert ranks.run(4, stale_steps, store_path, factory) == [[5.0]] * 4


class Slices(Optimizer):
    """Keeps state that DTensors do not describe: of the rank's part, a history, a scale, and what each rank finds."""

    def __init__(self, parameters: Iterable[Any], differing: float = 1.0) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.differing = differing

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own, size = 1.0 + self.differing * torch.distributed.get_rank(), torch.distributed.get_world_size()
        for parameter in self.param_groups[0]["params"]:
            here = local(parameter)
            part = here if isinstance(parameter, DTensor) else here.flatten().chunk(size)[torch.distributed.get_rank()]
            self.state[parameter] = {
                "step": torch.tensor(3.0),
                "momentum": torch.full_like(part, own),
                "blocks": [torch.full((4,), own), {"of": torch.ones(2, 2)}],
                "history": torch.arange(16.0),
                "scale": torch.full((1,), own),
            }


def sliced(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 1 if kind == "one row" else 6, bias=False)
    if kind in ("fsdp2", "one row"):  # rank 0 has the whole row
        fully_shard(model)
    elif kind == "other dimension":
        fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    return model


def with_slices(rank: int, size: int, path: Path, kind: str) -> list[Any]:
    model, run = sliced(kind), kind.replace(" ", "-")
    trained = Slices(model.parameters())
    trained.step()
    with logged() as said:
        save_model_and_optim_state(path, model, trained, run=run, step=1)
    fresh = sliced(kind)
    other, found = Slices(fresh.parameters()), list[Any]()
    for _ in range(2):  # first into missing state, then into existing state
        with logged() as loading:
            assert load_model_and_optim_state(path, f"{run}@1", fresh, other).unread_keys == ()
        (state,), (wanted,) = other.state.values(), trained.state.values()
        found += [identical(sorted(state.items()), sorted(wanted.items())), loading]
    outer = nn.Sequential(fresh)
    unnamed = Slices(outer.parameters())  # no parameter has the saved name
    load_model_and_optim_state(path, f"{run}@1", outer, unnamed, strict=False, unread="ignore")
    assert not unnamed.state
    refused = outcome_of(lambda: unshard_optim_state(path, f"{run}@1"))
    return [found, [text for text in said if "own" in text], str(refused)]


def load_slices(rank: int, size: int, path: Path, ref: str, kind: str) -> str:
    model = sliced(kind)
    before = local(model.weight).clone()
    error = outcome_of(lambda: load_model_and_optim_state(path, ref, model, Slices(model.parameters())))
    assert torch.equal(local(model.weight), before)
    load_model_and_optim_state(path, ref, model)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["fsdp2", "one row", "ddp"])
def test_state_that_each_rank_keeps_for_its_slice_is_exact_on_the_same_ranks_and_refused_on_others(
    store_path: Path, ranks: Pool, kind: str
) -> None:
    (first, *others) = ranks.run(2, with_slices, store_path, kind)
    for found, _, refused in (first, *others):
        assert found == [True, [], True, []]
        assert "each of 2 ranks keeps for its own part" in refused
    assert kind != "fsdp2" or "optim: each rank stores its own weight.blocks" in first[1][0]  # once in each process
    for size, other in ((3, kind), (1, kind), (2, "other dimension")):
        if kind == "fsdp2" or size != 2:
            for text in ranks.run(size, load_slices, store_path, f"{kind.replace(' ', '-')}@1", other):
                assert "Mismatch: 'optim' in" in text


def equal_beside_shards(rank: int, size: int, path: Path) -> None:
    model = sliced("fsdp2")
    trained = Slices(model.parameters(), 0.0)
    trained.step()
    save_model_and_optim_state(path, model, trained, run="zeros", step=1)
    del trained.state[model.weight]["momentum"]
    save_model_and_optim_state(path, model, trained, run="a", step=1)


def load_plain(rank: int, size: int, path: Path) -> dict[str, Any]:
    model = sliced("fsdp2")
    loaded = Slices(model.parameters())
    load_model_and_optim_state(path, "a@1", model, loaded)
    assert not any(isinstance(value, DTensor) for value in loaded.state[model.weight].values())
    return dict(loaded.state[model.weight])


def test_plain_state_of_a_sharded_parameter_is_plain_on_any_ranks_if_it_is_equal_on_all(
    store_path: Path, ranks: Pool
) -> None:
    ranks.run(2, equal_beside_shards, store_path)
    for size in (1, 2, 3):
        for state in ranks.run(size, load_plain, store_path):
            blocks, scale = [torch.ones(4), {"of": torch.ones(2, 2)}], torch.ones(1)
            want = {"step": torch.tensor(3.0), "blocks": blocks, "history": torch.arange(16.0), "scale": scale}
            assert identical(state, want)
    for text in ranks.run(3, load_slices, store_path, "zeros@1", "fsdp2"):
        assert "Mismatch: 'optim' in zeros@1" in text  # equal parts are parts, too


def leaves_something_unread(rank: int, size: int, path: Path) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    casckpt.open(path).save({"model": model.state_dict(), "ema": {"w": torch.ones(2)}}, run="unread", step=1)
    with logged() as said:
        load_model_and_optim_state(path, "unread@1", model)
    return [text for text in said if "'ema' of unread@1" in text]


def test_only_one_rank_reports_unread_keys(store_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, leaves_something_unread, store_path)
    assert (len(first), second) == (1, [])


def with_odd_state_beside_shards(rank: int, size: int, path: Path) -> list[str]:
    found = []
    make: Any = TwoTensor
    for value in (torch.complex(torch.ones(4), torch.ones(4)).conj(), make(torch.ones(4), torch.ones(4))):
        model: Any = nn.Linear(8, 6, bias=False)
        fully_shard(model)
        trained = optim.SGD(model.parameters(), lr=0.1)
        trained.state[model.weight] = {"scales": value}
        error = outcome_of(lambda: save_model_and_optim_state(path, model, trained, run="a", step=1, overwrite=True))  # noqa: B023
        found.append(str(error) if isinstance(error, Exception) else "saved")
    return found


def test_unsharded_state_of_a_sharded_parameter_is_compared_exactly_or_rejected(tmp_path: Path, ranks: Pool) -> None:
    for conjugate, wrapper in ranks.run(2, with_odd_state_beside_shards, tmp_path / "s"):
        assert conjugate == "saved"
        assert "'optim.state.weight.scales': a TwoTensor consists of other tensors" in wrapper
