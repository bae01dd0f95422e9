from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer
from casckpt.saving.layout import assigned, layout_of, plan_writes
from casckpt.saving.prepare import prepare
from tests.saving.test_replicas import Experts
from tests.support.ranks import Pool, outcome_of
from tests.support.together import visible

# refused layouts


def save_unchecked(rank: int, size: int, path: Path) -> Any:
    store, model = casckpt.open(path), Experts(rank)
    casckpt.save_model_and_optim_state(store, model, run="off", step=1, check_replicas="off")
    same: dict[str, Any] = {"model": Experts(0).state_dict()}
    store.save(same, run="off", step=2, check_replicas=False)
    store.save(same, run="raise", step=1, check_replicas="raise")
    with torch.no_grad():
        model.shared.weight[0, 0] += rank * 1e-6
    same = {"model": {"shared": model.shared.weight}}
    checks: list[Any] = ["raise", "no"]
    return [outcome_of(partial(store.save, same, run="raise", step=2, check_replicas=check)) for check in checks]


def test_check_replicas_compares_everything_or_nothing(ranks: Pool, path: Path) -> None:
    for differs, unknown in ranks.run(2, save_unchecked, path):
        assert isinstance(differs, InvalidInput)
        assert "'model.shared' differs between ranks 0 and 1" in str(differs)
        assert "pass 'raise', 'sample' or 'off'" in str(unknown)
    found = casckpt.open(path).read("off@1")["model"]
    assert all(torch.equal(found[name], value) for name, value in Experts(0).state_dict().items())
    assert visible(path) == [("off", 1), ("off", 2), ("raise", 1)]


# owned tensors


def owned(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)

    def owners(key: str) -> int | None:
        return size - 1 if key.startswith("ema.") else None

    state: dict[str, Any] = {"w": torch.ones(4), "ema": {"w": torch.full((5 + rank,), float(rank)), "n": rank}}
    if size > 1 and rank == 0:
        state["ema"] = {"w": None}
    store.save(state, run="a", step=1, owners=owners)
    model = Experts(rank)
    Checkpointer(store, run="b", owners=lambda key: 1 if "expert" in key else None).save(1, model)
    bads: list[Any] = [lambda key: size, lambda key: 0 if key == "ema.n" else owners(key), 3]
    errors = [str(outcome_of(partial(store.save, state, run="a", step=2, owners=bad))) for bad in bads]
    empty = {"ema": {"w": torch.zeros(4 + size), "n": None}}
    store.load(empty, "a@1")
    return empty, errors


@pytest.mark.parametrize("size", [2, 4])
def test_an_owned_tensor_is_saved_from_its_owner(ranks: Pool, path: Path, size: int) -> None:
    for empty, errors in ranks.run(size, owned, path):
        assert empty["ema"]["w"].tolist() == [size - 1] * (4 + size)
        assert empty["ema"]["n"] == size - 1
        for error, text in zip(
            errors, (f"to rank {size}", "does not hold the value", "owners=3 is not valid"), strict=True
        ):
            assert text in error
    assert torch.equal(casckpt.open(path).read("b@1")["model"]["expert.weight"], Experts(1).expert.weight)
    alone = {"ema": {"w": torch.zeros(4 + size)}}
    casckpt.open(path).load(alone, "a@1")
    assert alone["ema"]["w"].tolist() == [size - 1] * (4 + size)


# what a rank writes


def test_a_rank_describes_only_the_tensors_of_which_it_writes_a_part() -> None:
    state = {f"w{n}": torch.nn.Parameter(torch.rand(1024)) for n in range(6)} | {"none": torch.zeros(0), "n": 1}
    prepared = [prepare(state, None, rank=rank, size=2, allow_pickle=False) for rank in range(2)]
    plan = plan_writes([layout_of(each, 4096) for each in prepared])
    own = [assigned(each, plan.ranges[rank], rank) for rank, each in enumerate(prepared)]
    assert sorted(source.key for each in own for source in each.sources) == [f"w{n}" for n in range(6)]
    assert all(list(source.parts()) for each in own for source in each.sources)
    assert all(len(each.sources) == 3 for each in own)
