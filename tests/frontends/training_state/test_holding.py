"""The part of a parameter, and of its optimizer state, that a process has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from casckpt.format.sections.index import Entry
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.frontends.training_state.flat import FlatPart
from casckpt.frontends.training_state.holding import Holding
from tests.support.parallel import build, local, step
from tests.support.ranks import Pool


def test_state_of_a_flat_part_covers_the_same_elements() -> None:
    parameter, cpu = nn.Parameter(torch.zeros(3)), torch.device("cpu")
    holding = Holding("w", parameter, FlatPart(parameter, parameter.detach(), (4, 3), 5, 8, everywhere=False))
    entry = Entry("tensor", "x", 0, None, "float32", 4, (4, 3), 0)
    there = torch.ones(3)
    found = holding.destination(entry, there, cpu, set(), added=False)
    assert (found.data is there, found.shape, found.flat) == (True, (4, 3), ((5, 8),))
    for unfit, taken in ((None, 0), (torch.ones(4), 0), (there.double(), 0), (there, there.data_ptr())):
        made = holding.destination(entry, unfit, cpu, {taken}, added=False)
        assert made.data is not unfit
        assert (made.data.shape, made.data.dtype, made.flat) == ((3,), torch.float32, ((5, 8),))
    assert holding.as_saved({"exp_avg": there})["exp_avg"].flat == ((5, 8),)
    assert not holding.is_nothing
    assert Holding("w", parameter, FlatPart(parameter, there[:0], (4, 3), 0, 0, everywhere=False)).is_nothing


def over_shards(rank: int, size: int, path: Path) -> list[tuple[str, bool, bool]]:
    model, optimizer = build("fsdp2 on 2", 1)
    step(model, optimizer, range(2))
    added: dict[str, Any] = {"history": torch.arange(7.0), "scale": torch.tensor(2.0)}
    for parameter, state in optimizer.state.items():
        state.update({name: value.clone() for name, value in added.items()}, ema=parameter.detach().clone())
    save_model_and_optim_state(path, model, optimizer, run="a", step=2)
    fresh, other = build("fsdp2 on 2", 2, shape_seed=1)
    load_model_and_optim_state(path, "a@2", fresh, other)
    pairs = zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    found = []
    for source, parameter in pairs:
        for name, value in optimizer.state.get(source, {}).items():
            loaded = other.state[parameter][name]
            alike = type(loaded) is type(value) and torch.equal(local(loaded), local(value))
            found.append((name, isinstance(loaded, DTensor), alike))
    return found


def test_state_is_stored_as_a_whole_unless_it_has_the_shape_of_a_shard(store_path: Path, ranks: Pool) -> None:
    for found in ranks.run(2, over_shards, store_path):
        assert {name for name, _, _ in found} == {"step", "exp_avg", "exp_avg_sq", "history", "scale", "ema"}
        assert all(alike for _, _, alike in found)
        assert all(sharded == (name in ("exp_avg", "exp_avg_sq", "ema")) for name, sharded, _ in found)
