"""The contents of a checkpoint on several ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from casckpt.errors import NotFound
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.store.opening import open as open_store
from tests.support.logs import logged
from tests.support.parallel import local, sharded
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import small_folder
from tests.support.training import identical


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def draws() -> tuple[Any, ...]:
    rng = np.random.mtrand._rand  # the global generator
    return random.random(), float(rng.random()), float(torch.rand(()))


# train state


def save_draws(rank: int, size: int, path: Path) -> Any:
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the save stores the global generator
    torch.manual_seed(rank)
    own: dict[str, Any] = {"only on 1": {"deep": torch.ones(2)}} if rank == 1 else {"value": rank}
    Checkpointer(small_folder(path), run="sft").save(1, model(), None, TrainState(own=own))
    return draws()


def load_draws(rank: int, size: int, path: Path) -> Any:
    checkpointer = Checkpointer(small_folder(path), run="sft")
    state = TrainState(own=None)
    assert checkpointer.resume(model(), None, state)
    raw = checkpointer.load("sft@1", model())
    return draws(), state["own"], raw["own"]


def test_each_rank_loads_its_own_value_and_new_ranks_load_that_of_rank_0(store_path: Path, ranks: Pool) -> None:
    saved = ranks.run(2, save_draws, store_path)
    for size in (1, 2, 3):
        found = ranks.run(size, load_draws, store_path)
        assert [drawn for drawn, _, _ in found][:2] == saved[:size]
        assert found[0][1:] == ({"value": 0}, {"value": 0})
        if size > 1:
            assert list(found[1][1]) == ["only on 1"]
        if size > 2:
            assert found[2][1:] == ({"value": 0}, {"value": 0})
            assert found[2][0] not in saved  # no two ranks draw the same numbers
            assert ranks.run(3, load_draws, store_path)[2][0] == found[2][0]  # but each resume draws the same numbers


class Stage(nn.Module):
    """One layer of a model, under its name in the whole model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(int(name))
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3)})


def two_stages_a_rank(rank: int, size: int, path: Path) -> Any:
    """Save and load a pipeline on two ranks. Each rank has two stages, with an optimizer for each."""
    stages = [Stage(str(2 * (rank % 2) + number)) for number in range(2)]

    def optims(rate: float) -> list[torch.optim.AdamW]:
        return [torch.optim.AdamW(one.parameters(), lr=rate * (at + 1)) for at, one in enumerate(stages)]

    trained = optims(0.1)
    for stage, optim in zip(stages, trained, strict=True):
        next(iter(stage.layers.values()))(torch.ones(1, 3)).sum().backward()
        optim.step()
    checkpointer = Checkpointer(small_folder(path), run="sft")
    checkpointer.save_async(1, stages, trained)
    weights = [parameter for stage in stages for parameter in stage.parameters()]
    want = [parameter.detach().clone() for parameter in weights]
    checkpointer.wait()
    for parameter in weights:
        nn.init.zeros_(parameter)
    fresh = optims(7.0)
    checkpointer.load("sft@1", stages, fresh, load_optim_state=True)
    rates = [group["lr"] for optim in fresh for group in optim.param_groups]
    return all(map(torch.equal, want, weights)), rates, [len(optim.state) for optim in fresh]


def test_pipeline_stages_and_their_optimizers_can_be_lists(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(4, two_stages_a_rank, store_path) == [(True, [0.1, 0.2], [2, 2])] * 4
    assert len(small_folder(store_path).read("sft@1")["model"]) == 8


# dropped entries


def train_thinned(rank: int, size: int, path: Path) -> Any:
    """Save six sharded checkpoints with AdamW. All but the last two are thinned to drop the optimizer's state."""
    torch.manual_seed(0)
    whole = sharded(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
    optimizer = torch.optim.AdamW(whole.parameters())
    checkpointer = Checkpointer(open_store(path), run="sft", thin={"drop": ["optim.*"], "keep_last": 2})
    sums = []
    for step in range(6):
        whole(torch.randn(3, 512)).square().mean().backward()
        optimizer.step()
        checkpointer.save(step, whole, optimizer)
        sums.append([local(one).double().sum().item() for one in whole.parameters()])
    return sums


def load_thinned(rank: int, size: int, path: Path) -> Any:
    whole = sharded(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
    optimizer = torch.optim.AdamW(whole.parameters())
    checkpointer = Checkpointer(open_store(path), run="sft")
    sums = []
    for step in range(6):
        checkpointer.load(f"sft@{step}", whole)
        sums.append([local(one).double().sum().item() for one in whole.parameters()])
    told = outcome_of(lambda: checkpointer.load("sft@0", whole, optimizer))
    resumed = checkpointer.resume(whole, optimizer)
    assert resumed is not None
    return sums, str(told), resumed.step


def test_sharded_optimizers_are_dropped_from_older_checkpoints(store_path: Path, ranks: Pool) -> None:
    saved = ranks.run(2, train_thinned, store_path)
    store = open_store(store_path)
    before = store.stats().bytes_blobs
    dropped = [one.dropped for one in store.checkpoints()]
    assert [one is not None for one in dropped] == [True] * 4 + [False] * 2
    freed = store.gc(wait=0).deleted_bytes
    assert freed >= 0.95 * sum(one.bytes for one in dropped if one is not None)
    assert store.stats().bytes_blobs == before - freed
    for rank, (sums, told, resumed) in enumerate(ranks.run(2, load_thinned, store_path)):
        assert (sums, resumed) == (saved[rank], 5)
        assert "thinned by --drop 'optim.*'" in told
    assert not store.verify().is_damaged


def load_without_an_optimizer(rank: int, size: int, path: Path) -> list[str]:
    checkpointer, whole = Checkpointer(open_store(path), run="sft"), model()
    checkpointer.save(1, whole)
    with logged() as said:
        checkpointer.load("sft@1", whole, torch.optim.AdamW(whole.parameters()))
    return [text for text in said if "has no optimizer" in text]


def test_one_rank_logs_that_the_optimizer_is_missing(store_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, load_without_an_optimizer, store_path)
    assert (len(first), second) == (1, [])


# several models and optimizers


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("how", [{}, {"missing": "warn"}, {"prove": True}])
def test_models_in_a_dict_resume_with_their_optimizers_in_a_dict_or_a_list(
    store_path: Path, kind: type, how: dict[str, Any]
) -> None:
    def made() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        models: dict[str, nn.Module] = {"g": model(), "d": model()}
        return models, {name: torch.optim.Adam(one.parameters()) for name, one in models.items()}

    def given(optims: dict[str, torch.optim.Optimizer]) -> Any:
        return optims if kind is dict else [*optims.values()]

    models, optims = made()
    for name, one in models.items():
        one(torch.ones(1, 3)).sum().backward()
        optims[name].step()
    Checkpointer(store_path, run="gan").save(1, models, given(optims))
    others, fresh = made()
    assert Checkpointer(store_path, run="gan").resume(others, given(fresh), **how)
    assert all(identical(dict(others[name].state_dict()), dict(models[name].state_dict())) for name in models)
    assert all(identical(fresh[name].state_dict(), optims[name].state_dict()) for name in models)
    _, left = made()
    Checkpointer(store_path, run="gan").load("gan@1", others, given(left), load_optim_state=False)
    assert not any(one.state for one in left.values())


def test_optimizers_that_the_checkpoint_lacks_are_named(store_path: Path) -> None:
    models = {"g": model(), "d": model()}
    Checkpointer(store_path, run="gan").save(1, models)
    optims = {name: torch.optim.Adam(one.parameters()) for name, one in models.items()}
    with pytest.raises(NotFound, match="gan@1 has no optimizer that can be loaded; it has 'g', 'd'"):
        Checkpointer(store_path, run="gan").resume(models, optims)
    assert Checkpointer(store_path, run="gan").resume(models, optims, missing="warn")
    assert not any(one.state for one in optims.values())


@pytest.mark.parametrize("wanted", [None, True, False])
def test_load_optim_state_counts_for_optimizers_beside_their_models(store_path: Path, wanted: bool | None) -> None:
    def made() -> dict[str, Any]:
        one = model()
        return {"g": {"model": one, "optim": torch.optim.Adam(one.parameters())}}

    saved = made()
    saved["g"]["model"](torch.ones(1, 3)).sum().backward()
    saved["g"]["optim"].step()
    Checkpointer(store_path, run="gan").save(1, saved)
    fresh = made()
    Checkpointer(store_path, run="gan").load("gan@1", fresh, load_optim_state=wanted)
    assert identical(dict(fresh["g"]["model"].state_dict()), dict(saved["g"]["model"].state_dict()))
    other = made() if wanted is False else saved
    assert identical(fresh["g"]["optim"].state_dict(), other["g"]["optim"].state_dict())
