"""Weights for a different model: base models with tied weights, new heads, and several mismatches together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.frontends.convert import import_safetensors
from casckpt.frontends.trainer import Checkpointer
from casckpt.store.store import Store
from tests.support.ranks import Pool
from tests.support.renames import rename_in
from tests.support.saves import small, small_folder
from tests.support.training import identical

transformers = pytest.importorskip("transformers", reason="the extra is not installed")

Load = Callable[..., Any]


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def by_function(store: Store, ref: str, model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    return casckpt.load_model_and_optim_state(store, ref, model, optimizer, **options)


def by_checkpointer(store: Store, ref: str, model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    return Checkpointer(store, run="new").load(ref, model, optimizer, **options)


LOADS = [by_function, by_checkpointer]


@pytest.mark.parametrize("load", LOADS)
def test_a_base_model_with_tied_weights_loads_without_a_head(load: Load, tmp_path: Path) -> None:
    base, model = gpt2(1), gpt2(2)
    base.save_pretrained(tmp_path / "gpt2")
    store = small()
    import_safetensors(store, tmp_path / "gpt2", run="base", step=0)
    assert "lm_head.weight" not in store.get("base@0").tensors
    load(store, "base@0", model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert identical(dict(model.state_dict()), dict(base.state_dict()))
    untied = gpt2(3)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.clone())
    with pytest.raises(MissingKey, match=r"lm_head\.weight"):
        load(store, "base@0", untied)


@pytest.mark.parametrize("load", LOADS)
def test_a_model_with_different_top_level_names_is_reported(load: Load) -> None:
    store = small()
    store.save({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "1.scale": torch.ones(1)}, run="base", step=0)
    model: Any = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(Mismatch, match=r"'1\.scale', which this model lacks"):
        load(store, "base@0", model)
    load(store, "base@0", model, strict=False)
    assert model[0].weight.eq(1).all()
    with pytest.raises(MissingKey, match=r"fill 0 of 2 tensors .* lacks 'model\.2\.weight'"):
        load(store, "base@0", nn.ModuleDict({"2": nn.Linear(2, 2)}), ignore_mismatched=["0*", "1*"])


@pytest.mark.parametrize("load", LOADS)
def test_a_model_stored_under_a_different_key_loads_with_the_suggested_rename(load: Load) -> None:
    store = small()
    store.save({"net": {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}}, run="base", step=0)
    model: Any = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(MissingKey, match=r"has 'net\.0\.weight'") as caught:
        load(store, "base@0", model)
    load(store, "base@0", model, rename=rename_in(str(caught.value)))
    assert model[0].weight.eq(1).all()


def classifier(seed: int, classes: int) -> tuple[Any, optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, classes)})
    return model, optim.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()
    model["head"](model["body"](torch.ones(3, 4))).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("load", LOADS)
def test_a_new_head_and_its_optimizer_state_remain_unchanged(load: Load) -> None:
    store, (base, base_optimizer) = small(), classifier(1, 3)
    step(base, base_optimizer)
    casckpt.save_model_and_optim_state(store, base, base_optimizer, run="base", step=1)
    model, optimizer = classifier(2, 5)
    head = copy.deepcopy(model["head"].state_dict())
    with pytest.raises(Mismatch, match=r"model\.head\.weight"):
        load(store, "base@1", model, ignore_mismatched=["body.*"])
    for patterns in (["head.*"], "model.head.*"):
        load(store, "base@1", model, optimizer, ignore_mismatched=patterns)
        assert identical(dict(model["head"].state_dict()), dict(head))
        assert identical(dict(model["body"].state_dict()), dict(base["body"].state_dict()))
        assert set(optimizer.state) == set(model["body"].parameters())
    exp_avg = optimizer.state[model["body"].weight]["exp_avg"]
    assert torch.equal(exp_avg, base_optimizer.state[base["body"].weight]["exp_avg"])
    step(model, optimizer)  # the optimizer state matches
    with pytest.raises(InvalidInput, match="ignore_mismatched"):
        load(store, "base@1", model, ignore_mismatched=7)


@pytest.mark.parametrize("load", LOADS)
def test_a_head_with_a_different_name_remains_unchanged(load: Load) -> None:
    store, (base, base_optimizer) = small(), classifier(1, 3)
    step(base, base_optimizer)
    casckpt.save_model_and_optim_state(store, base, base_optimizer, run="base", step=1)
    model, optimizer = classifier(2, 3)
    model["score"] = model.pop("head")
    score = copy.deepcopy(model["score"].state_dict())
    with pytest.raises((MissingKey, Mismatch)):
        load(store, "base@1", model, optimizer, ignore_mismatched=["score.*"])  # the old head's state does not match
    load(store, "base@1", model, optimizer, ignore_mismatched=["score.*", "head.*"])
    assert identical(dict(model["score"].state_dict()), dict(score))
    assert set(optimizer.state) == set(model["body"].parameters())


@pytest.mark.parametrize("load", LOADS)
def test_a_load_without_strict_reports_all_differences_together(load: Load) -> None:
    store, (base, _) = small(), classifier(1, 3)
    base["old"] = nn.Linear(1, 1)
    casckpt.save_model_and_optim_state(store, base, run="base", step=1)
    model, _ = classifier(2, 5)
    model["new"] = nn.Linear(1, 1)
    with pytest.raises(Mismatch, match="2 keys do not fit") as caught:
        load(store, "base@1", model, strict=False)
    for name in ("head.weight", "head.bias", "new.weight", "new.bias", "old.weight", "old.bias"):
        assert f"model.{name}" in str(caught.value)


def load_on_ranks(rank: int, size: int, path: Path) -> list[str]:
    """With FSDP2, load a tied model without its second name, and a model with a new head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    store, wrong = casckpt.open(path), []
    model: Any = nn.Sequential()
    for name, part in (("emb", nn.Embedding(6, 4)), ("out", nn.Linear(4, 6, bias=False)), ("head", nn.Linear(4, 5))):
        model.add_module(name, part)
    model.out.weight = model.emb.weight
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = optim.AdamW(model.parameters())
    loaded = casckpt.load_model_and_optim_state(store, "base@1", model, optimizer, ignore_mismatched=["head.*"])
    if not model.emb.weight.full_tensor().eq(1).all():
        wrong.append("the embedding differs from the saved one")
    if loaded.mismatched_keys != ("model.head.weight", "model.head.bias"):
        wrong.append(str(loaded.mismatched_keys))
    names = {name for name, one in model.named_parameters() if one in optimizer.state}
    return wrong if names == {"emb.weight"} else [*wrong, str(names)]


def test_all_ranks_load_tied_weights_and_a_new_head(tmp_path: Path, ranks: Pool) -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(6, 4), "head": nn.Linear(4, 3)})
    for one in model.parameters():
        one.data.fill_(1.0)
        one.grad = torch.ones_like(one)
    optimizer = optim.AdamW(model.parameters(), lr=0.0)
    optimizer.step()
    casckpt.save_model_and_optim_state(small_folder(tmp_path), model, optimizer, run="base", step=1)
    assert ranks.run(2, load_on_ranks, tmp_path) == [[], []]
