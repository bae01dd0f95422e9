"""Keys that a model saves but does not read are refused. Extra state is saved and loaded, and hooks are called."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state, unshard_model_state
from casckpt.frontends.training_state.model import model_state, passed_by
from tests.support.training import everything, identical


class Scaled(nn.Linear):
    """A layer that saves a scale along with its weight, but does not read the scale."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 3)
        self.scale = torch.tensor([scale])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale


class Reading(Scaled):
    """Like `Scaled`, but also reads the scale."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(prefix + "weight.absmax")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Normed(nn.BatchNorm1d):
    """Saves an additional key that torch's _load_from_state_dict for batch norms does not read."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "limits"] = torch.zeros(2)


class Told(nn.Linear):
    """A layer with extra state but without set_extra_state."""

    def get_extra_state(self) -> Any:
        return torch.ones(2)


def popping(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
    """A hook that reads the scale that `Scaled` saves."""
    module.scale = state.pop(prefix + "weight.absmax")


def names_passed_by(model: nn.Module, *, strict: bool = False) -> list[str]:
    return list(passed_by(model, model_state(model), strict=strict))


@pytest.mark.parametrize("strict", [True, False])
def test_keys_that_a_module_saves_but_does_not_read_are_rejected_before_any_change(
    store: casckpt.Store, strict: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Scaled(2.0))
    save_model_and_optim_state(store, model, torch.optim.AdamW(model.parameters()), run="a", step=1)
    fresh = nn.Sequential(nn.Linear(3, 3), Scaled(3.0))
    optim = torch.optim.AdamW(fresh.parameters())
    before = everything(fresh, optim)
    with pytest.raises(Mismatch, match=r"'1\.weight\.absmax', which its load_state_dict does not read") as refused:
        load_model_and_optim_state(store, "a@1", fresh, optim, strict=strict)
    assert refused.value.keys == ("1.weight.absmax",)
    assert identical(everything(fresh, optim), before)


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a plain layer between two layers that do not read all the keys that they save."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layers": nn.ModuleList([Scaled(float(seed)), nn.Linear(3, 3), Scaled(float(seed))])})
    optim = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optim.step()
    return model, optim


def test_modules_with_unread_keys_can_be_left_unchanged_as_the_error_advises(store: casckpt.Store) -> None:
    model, optim = made(1)
    save_model_and_optim_state(store, model, optim, run="a", step=1)
    fresh, other = made(2)
    with pytest.raises(Mismatch) as refused:
        load_model_and_optim_state(store, "a@1", fresh, other)
    patterns = ast.literal_eval(str(refused.value).rpartition("ignore_mismatched=")[2])
    assert patterns == ["layers.*.*"]
    loaded = load_model_and_optim_state(store, "a@1", fresh, other, ignore_mismatched=patterns)
    left = {f"layers.{number}.{name}" for number in (0, 2) for name in ("weight", "bias", "weight.absmax")}
    assert set(loaded.mismatched_keys) == {f"model.{name}" for name in left}
    assert not any(key.startswith("model.") for key in (*loaded.unread_keys, *loaded.missing_keys))
    unchanged, unchanged_optim = made(2)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, (unchanged if name in left else model).state_dict()[name]), name
    for name, parameter in fresh.named_parameters():
        source, trained = (unchanged, unchanged_optim) if name in left else (model, optim)
        assert identical(other.state[parameter], trained.state[source.get_parameter(name)]), name


def test_a_save_warns_once_about_keys_that_a_load_will_reject(
    store: casckpt.Store, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"once": Scaled(1.0), "plain": nn.Linear(2, 2)})
    for number in range(3):
        save_model_and_optim_state(store, model, run="a", step=number)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'once.weight.absmax', which its load_state_dict does not read" in caplog.text


def test_modules_with_unread_keys_do_not_prevent_loading_the_others(store: casckpt.Store) -> None:
    adapter = nn.Linear(3, 3)
    save_model_and_optim_state(store, nn.ModuleDict({"adapter": adapter}), run="a", step=1)
    model: Any = nn.ModuleDict({"adapter": nn.Linear(3, 3), "base": Scaled(2.0)})
    load_model_and_optim_state(store, "a@1", model, strict=False)
    assert torch.equal(model["adapter"].weight, adapter.weight)


def test_keys_that_a_module_reads_in_any_way_are_loaded(store: casckpt.Store) -> None:
    hooked: Any = Scaled(7.0)
    after: Any = Scaled(7.0)
    above: Any = nn.Sequential(Told(3, 3))
    hooked.register_load_state_dict_pre_hook(popping)
    after.register_load_state_dict_post_hook(lambda module, keys: keys.unexpected_keys.clear())
    above.register_load_state_dict_pre_hook(lambda module, state, *args: state.pop("0._extra_state"))
    assert [names_passed_by(model) for model in (Reading(7.0), hooked, after, above)] == [[]] * 4
    for number, model in enumerate((Reading(7.0), hooked)):
        save_model_and_optim_state(store, Scaled(2.0), run="a", step=number)
        load_model_and_optim_state(store, f"a@{number}", model)
        assert torch.equal(model.scale, torch.tensor([2.0]))


def test_keys_that_a_module_reads_are_found_without_calling_it() -> None:
    inside: Any = nn.Sequential(Scaled(1.0))
    inside.register_load_state_dict_pre_hook(lambda module, state, *args: None)  # does not know the keys below
    assert names_passed_by(inside) == ["0.weight.absmax"]
    assert names_passed_by(Normed(2)) == ["limits"]
    assert names_passed_by(Told(2, 2)) == ["_extra_state"]
    assert names_passed_by(nn.Sequential(nn.BatchNorm1d(2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1))) == []
    compiled: Any = torch.compile(nn.Sequential(Scaled(1.0)), backend="eager")
    assert names_passed_by(compiled) == ["0.weight.absmax"]


def test_a_second_name_of_a_parameter_is_filled_unless_torch_would_require_it(store: casckpt.Store) -> None:
    def named(seed: int) -> Any:
        torch.manual_seed(seed)
        model: Any = nn.Linear(3, 3)
        model.register_state_dict_post_hook(
            lambda module, state, prefix, metadata: state.update({f"{prefix}old": state[f"{prefix}weight"]})
        )
        return model

    model, fresh = named(1), named(2)
    save_model_and_optim_state(store, model, run="a", step=1)
    before = fresh.weight.detach().clone()
    with pytest.raises(Mismatch, match="'old'"):
        load_model_and_optim_state(store, "a@1", fresh)
    assert torch.equal(fresh.weight, before)
    load_model_and_optim_state(store, "a@1", fresh, strict=False)
    assert torch.equal(fresh.weight, model.weight)


class Packing(nn.Linear):
    """Like a Linear4bit: its state_dict has a copy of a value without which its weight has no meaning."""

    def __init__(self, offset: int) -> None:
        super().__init__(3, 3)
        self.offset = offset
        nn.init.constant_(self.weight, offset)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.quant_state.bitsandbytes__nf4"] = torch.tensor([self.offset], dtype=torch.uint8)


class Unpacking(Packing):
    """Like `Packing`, but also reads its additional keys."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.offset = int(state_dict.pop(prefix + "weight.quant_state.bitsandbytes__nf4"))
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_copy_of_a_value_in_a_state_dict_is_filled_only_with_equal_values(store: casckpt.Store) -> None:
    store.save({"model": Packing(1).state_dict()}, run="a", step=1)
    same, other = Packing(1), Packing(2)
    nn.init.zeros_(same.weight)
    store.load({"model": same.state_dict()}, "a@1")
    assert torch.equal(same.weight, Packing(1).weight)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for options in ({}, {"strict": False}, {"ignore_mismatched": ["*"]}):
        with pytest.raises(Mismatch, match=r"Omit 'model\.weight', and all keys that begin with it, from") as refused:
            store.load({"model": other.state_dict()}, "a@1", **options)
        assert refused.value.keys == ("model.weight.quant_state.bitsandbytes__nf4",)
        assert identical(dict(other.state_dict()), before)
    with pytest.raises(Mismatch, match="bitsandbytes"):
        store.update({"model": other.state_dict()}, "a@1", held=None)
    left = {name: value for name, value in other.state_dict().items() if not name.startswith("weight")}
    store.load({"model": left}, "a@1")  # as the error advises
    assert torch.equal(other.bias, store.read("a@1")["model"]["bias"])


def test_packing_modules_do_not_prevent_loading_the_other_modules(store: casckpt.Store) -> None:
    store.save({"model": {"bias": torch.ones(3)}, "plain": {"weight": torch.ones(3, 3)}}, run="a", step=1)
    model = Packing(2)
    store.load({"model": model.state_dict()}, "a@1", strict=False, unread="ignore")
    assert torch.equal(model.bias, torch.ones(3))
    with pytest.raises(Mismatch, match="bitsandbytes"):  # only its weights
        store.load({"plain": model.state_dict()}, "a@1", strict=False)


def test_a_module_that_packs_its_state_receives_the_packed_state(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, Packing(1), run="a", step=1)
    model = Unpacking(2)
    load_model_and_optim_state(store, "a@1", model)
    assert (model.offset, model.weight[0, 0].item()) == (1, 1.0)


class Statistics:
    """Like a QuantState of bitsandbytes with nested statistics."""

    def __init__(self, offset: float) -> None:
        self.nested, self.offset, self.state2 = True, torch.tensor(offset), self
        self.code = torch.full((2,), offset)


class Quantized(nn.Linear):
    """Like a Linear4bit with nested statistics."""

    def __init__(self, offset: float, kind: str = "nf4") -> None:
        super().__init__(3, 3)
        nn.init.constant_(self.weight, offset)
        self.statistics, self.kind = Statistics(offset), kind
        vars(self.weight)["quant_state"] = self.statistics

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        fields = json.dumps({"nested_offset": self.statistics.offset.item(), "kind": self.kind})
        destination[prefix + "weight.nested_quant_map"] = self.statistics.code.clone()
        destination[prefix + "weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*fields.encode()]).to(torch.uint8)


def test_a_quantized_weight_receives_the_values_that_its_state_dict_copies(store: casckpt.Store) -> None:
    save_model_and_optim_state(store, Quantized(0.25), run="a", step=1)
    model, other = Quantized(3.0), Quantized(3.0, "fp4")
    load_model_and_optim_state(store, "a@1", model)
    assert identical(dict(model.state_dict()), dict(store.read("a@1")["model"]))
    assert model.statistics.offset == 0.25
    for strict in (True, False):
        with pytest.raises(Mismatch, match='kind is "fp4" here, but "nf4"'):
            load_model_and_optim_state(store, "a@1", other, strict=strict)
    load_model_and_optim_state(store, "a@1", other, ignore_mismatched=["weight*"])
    assert (other.statistics.offset.item(), other.weight[0, 0].item()) == (3.0, 3.0)


# extra state


class Extra(nn.Linear):
    """A layer with extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [None, 7, {"amax": [1.0, 2.0]}, {}, {"history": torch.ones(3), "deep": [torch.zeros(2), "x"]}, torch.arange(4)],
)
def test_extra_state_is_saved_and_loaded(store: casckpt.Store, extra: Any) -> None:
    save_model_and_optim_state(store, nn.Sequential(Extra(extra)), run="a", step=1)
    for there in (None, {"other": torch.ones(1)}, torch.zeros(9)):
        fresh = Extra(there)
        load_model_and_optim_state(store, "a@1", nn.Sequential(fresh))
        assert identical(fresh.extra, extra)
    assert identical(unshard_model_state(store, "a@1")["0._extra_state"], extra)


class Odd:
    """A value that is not plain data."""

    x = 0


def test_the_error_for_extra_state_that_is_not_plain_data_names_the_key(store: casckpt.Store) -> None:
    odd = Odd()
    odd.x = 7
    model = nn.Sequential(Extra(odd))
    with pytest.raises(InvalidInput, match=r"model\.0\._extra_state"):
        save_model_and_optim_state(store, model, run="a", step=1)
    save_model_and_optim_state(store, model, run="a", step=1, allow_pickle=True)
    fresh = Extra(None)
    load_model_and_optim_state(store, "a@1", nn.Sequential(fresh), allow_pickle=True)
    assert fresh.extra.x == 7


def test_extra_state_absent_from_the_checkpoint_is_rejected(store: casckpt.Store) -> None:
    model = nn.Linear(2, 2)
    save_model_and_optim_state(store, model, run="a", step=1)
    fresh = Extra("mine")
    with pytest.raises(MissingKey, match="_extra_state"):
        load_model_and_optim_state(store, "a@1", fresh)
    load_model_and_optim_state(store, "a@1", fresh, strict=False)
    assert fresh.extra == "mine"
    assert torch.equal(fresh.weight, model.weight)


# hooks


class Transposed(nn.Module):
    """A module whose state_dict has its weight transposed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)))
        self.loads = 0
        hooked: Any = self  # torch has no types for these hooks
        hooked.register_state_dict_post_hook(lambda module, state, prefix, local: turn(state, prefix))
        hooked.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: turn(state, prefix))
        hooked.register_load_state_dict_post_hook(lambda module, keys: module.loaded())

    def loaded(self) -> None:
        self.loads += 1


def turn(state: Any, prefix: str) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].t().contiguous()


def test_saves_and_loads_call_the_hooks_of_a_module(store: casckpt.Store) -> None:
    model, fresh = Transposed(1), Transposed(2)
    saved = save_model_and_optim_state(store, model, run="a", step=1)
    assert saved.tensors["model.weight"].shape == (2, 3)
    load_model_and_optim_state(store, "a@1", fresh)
    assert torch.equal(fresh.weight, model.weight)
    assert fresh.loads == 1
