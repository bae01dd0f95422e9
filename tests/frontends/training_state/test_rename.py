"""Parameters that were saved under different names: ``rename`` applies to the model, its optimizer, and the checks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.tensors.dtensors import local_of
from tests.support.ranks import Pool
from tests.support.training import everything, identical

RENAME = {r"model\.trunk\.(.*)": r"model.body.\1"}

Load = Callable[..., Any]


def made(first: str, seed: int, second: str = "head") -> tuple[nn.Module, optim.Optimizer]:
    """Return a model with two layers of these names, the first of which has a buffer, and its optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = OrderedDict([(first, nn.BatchNorm1d(3)), (second, nn.Linear(3, 2))])
        model = nn.Sequential(layers)
    return model, optim.AdamW(model.parameters(), lr=0.1 * seed)


def trained(first: str, seed: int) -> tuple[nn.Module, optim.Optimizer]:
    model, optimizer = made(first, seed)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    return model, optimizer


def load_state(store: casckpt.Store, ref: str, *what: Any, **options: Any) -> Any:
    return load_model_and_optim_state(store, ref, *what, **options)


def load_by_trainer(store: casckpt.Store, ref: str, *what: Any, **options: Any) -> Any:
    return Checkpointer(store, run="a").load(ref, *what, **options)


def load_ahead(store: casckpt.Store, ref: str, *what: Any, **options: Any) -> Any:
    return Checkpointer(store, run="a", pre_download=True).load(ref, *what, **options)


LOADS = pytest.mark.parametrize("load", [load_state, load_by_trainer, load_ahead])


def alike(found: tuple[nn.Module, optim.Optimizer], saved: tuple[nn.Module, optim.Optimizer]) -> bool:
    weights = [list(model.state_dict().values()) for model, _ in (found, saved)]
    return identical(*weights) and identical(found[1].state_dict(), saved[1].state_dict())


@LOADS
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("rename", [RENAME, lambda key: key.replace("model.trunk", "model.body")])
def test_a_rename_maps_the_names_of_the_model_and_the_optimizer(
    store: casckpt.Store, load: Load, strict: bool, rename: Any
) -> None:
    saved = trained("body", 1)
    save_model_and_optim_state(store, *saved, run="a", step=1)
    found = made("trunk", 2)
    load(store, "a@1", *found, rename=rename, strict=strict)
    assert alike(found, saved)
    assert len(found[1].state) == 4


def test_a_rename_leaves_no_missing_or_unread_keys(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, *trained("body", 1), run="a", step=1)
    loaded = load_model_and_optim_state(store, "a@1", *made("trunk", 2), rename=RENAME)
    assert (loaded.missing_keys, loaded.unread_keys) == ((), ())


@LOADS
def test_names_that_still_differ_after_a_rename_are_reported(store: casckpt.Store, load: Load) -> None:
    save_model_and_optim_state(store, *trained("body", 1), run="a", step=1)
    found = made("trunk", 2, "tail")
    before = everything(*found)
    with pytest.raises((MissingKey, Mismatch), match=r"head"):
        load(store, "a@1", *found, rename=RENAME)
    assert identical(everything(*found), before)
    load(store, "a@1", *found, rename=RENAME, strict=False)
    assert {id(p) for p in found[1].state} == {id(p) for p in found[0].get_submodule("trunk").parameters()}


def test_missing_keys_are_reported_under_their_new_names(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, *trained("body", 1), run="a", step=1)
    loaded = load_model_and_optim_state(store, "a@1", *made("trunk", 2, "tail"), rename=RENAME, strict=False)
    assert loaded.missing_keys == (
        "model.tail.weight", "model.tail.bias", "optim.state.tail.weight", "optim.state.tail.bias",
    )  # fmt: skip
    assert set(loaded.unread_keys) >= {"model.head.weight", "model.head.bias"}


@LOADS
def test_a_rename_of_two_parameters_to_one_name_is_rejected(store: casckpt.Store, load: Load) -> None:
    saved = nn.Sequential(OrderedDict(one=nn.Linear(3, 3)))
    save_model_and_optim_state(store, saved, optim.SGD(saved.parameters()), run="a", step=1)
    two = nn.Sequential(OrderedDict(one=nn.Linear(3, 3), two=nn.Linear(3, 3)))
    rename = {r"model\.two\.(.*)": r"model.one.\1"}
    before = everything(two)
    with pytest.raises(InvalidInput, match=r"'one\.weight'.*two"):
        load(store, "a@1", two, optim.SGD(two.parameters()), rename=rename)
    assert identical(everything(two), before)
    load(store, "a@1", two, None, rename=rename)
    assert identical(two[0].state_dict(), saved[0].state_dict())
    assert identical(two[1].state_dict(), saved[0].state_dict())


@LOADS
@pytest.mark.parametrize("rename", [5, {"(": "x"}, lambda key: None])
def test_an_invalid_rename_is_rejected(store: casckpt.Store, load: Load, rename: Any) -> None:
    save_model_and_optim_state(store, *trained("body", 1), run="a", step=1)
    found = made("trunk", 2)
    before = everything(*found)
    with pytest.raises(InvalidInput, match="rename"):
        load(store, "a@1", *found, rename=rename)
    assert identical(everything(*found), before)


@LOADS
def test_a_rename_applies_to_top_level_weights(store: casckpt.Store, load: Load) -> None:
    saved, _ = trained("body", 1)
    store.save(saved.state_dict(), run="a", step=1)
    found, _ = made("trunk", 2)
    rename = {r"model\.trunk\.(.*)": r"body.\1", r"model\.(.*)": r"\1"}
    load(store, "a@1", found, rename=rename)
    assert identical(list(found.state_dict().values()), list(saved.state_dict().values()))


class Module:
    """A train module like those of OLMo-core."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3)

    def state_dict_to_save(self) -> dict[str, Any]:
        return {"model": {"w": self.weight}}

    def state_dict_to_load(self, metadata: Any) -> dict[str, Any]:
        return {"model": {"w": self.weight}}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def test_a_rename_applies_to_a_train_module(store: casckpt.Store) -> None:
    store.save({"model": {"old": torch.ones(3)}, "train": {0: {"epoch": 3}}}, run="a", step=1)
    module = Module()
    train = Checkpointer(store, run="a").load("a@1", module, rename=lambda key: key.replace("w", "old"))
    assert module.weight.tolist() == [1, 1, 1]
    assert train == {"epoch": 3}


def on_ranks(rank: int, size: int, path: Path) -> list[bool]:
    from torch.distributed.fsdp import fully_shard

    store = casckpt.open(path)
    saved = trained("body", 1)
    fully_shard(saved[0])
    found = made("trunk", 2)
    fully_shard(found[0])
    results = []
    optimizer = optim.AdamW(saved[0].parameters(), lr=0.1)
    for parameter in saved[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_model_and_optim_state(store, saved[0], optimizer, run="a", step=1)
    for load in (load_state, load_by_trainer):
        other = optim.AdamW(found[0].parameters(), lr=0.7)
        load(store, "a@1", found[0], other, rename=RENAME)
        local = [[local_of(p) for p in model.parameters()] for model in (found[0], saved[0])]
        state = [[local_of(one["exp_avg"]) for one in o.state.values()] for o in (other, optimizer)]
        results.append(identical(*local) and identical(*state))
    return results


def test_a_rename_applies_to_sharded_parameters(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, on_ranks, tmp_path / "s") == [[True, True]] * 2
