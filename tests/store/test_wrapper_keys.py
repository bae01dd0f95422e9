"""Wherever users name keys, the key of a wrapper stands for all tensors that it contains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.cli.commands.show import details
from casckpt.contents.contents import Contents
from casckpt.errors import MissingKey
from casckpt.frontends.training_state import save_model_and_optim_state, unshard_model_state, unshard_optim_state
from casckpt.frontends.views.view import Rules, view_of
from casckpt.plan.difference import Change
from casckpt.store.store import Store
from casckpt.tensors.kinds import KINDS
from tests.support.saves import small, small_folder
from tests.support.wrappers import Mode, Options, Scaled, bits, rebuild, scaled

INNER = ["model.a.w.codes", "model.a.w.scale", "model.a.w.table"]
OUTER = pytest.mark.parametrize("pattern", ["model.a.w", "*.w", "model.?.w"])


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    casckpt.register_wrapper(Scaled, rebuild=rebuild)
    yield
    del KINDS["tests:Scaled"]


def state(seed: int = 1, **of: Any) -> dict[str, Any]:
    return {"model": {"a": {"w": scaled(seed, 8, 16, **of), "b": torch.full((3,), float(seed))}}, "lr": 0.5}


def saved(path: Path | None = None) -> Store:
    store = small() if path is None else small_folder(path)
    store.save(state(), run="r", step=1)
    return store


@OUTER
def test_the_key_of_a_wrapper_selects_its_tensors(tmp_path: Path, pattern: str) -> None:
    store = saved()
    assert [one["key"] for one in details(store, "r@1", (pattern,))["tensors"]] == INNER
    assert store.get("r@1").matching(pattern) == INNER
    (read,) = store.read("r@1", keys=[pattern])["model"]["a"].values()
    assert bits(read) == bits(scaled(1, 8, 16))
    contents = Contents.open(store.repository, store.get("r@1").commit)
    view = view_of(contents, Rules(keys=[pattern]))
    assert ([tensor.name for tensor in view.tensors], view.left_out) == (INNER, ())
    found = unshard_model_state(store, "r@1", keys=[pattern])
    assert [*found] == ["a.w"]
    store.export("r@1", tmp_path / "out", format="safetensors", keys=[pattern])


@OUTER
def test_a_wrapper_is_thinned_by_its_key(pattern: str) -> None:
    store = saved()
    store.save(state(2), run="r", step=2)
    result = store.thin("r@1", drop=[pattern])
    assert result.entries == 3
    with pytest.raises(MissingKey, match=r"'model\.a\.w"):
        store.load(state(), "r@1")
    template = state(3)
    del template["model"]["a"]["w"]
    store.load(template, "r@1")
    assert torch.equal(template["model"]["a"]["b"], torch.ones(3))


def test_the_key_of_a_tensor_in_a_wrapper_selects_that_tensor() -> None:
    """A read returns the whole wrapper, because its tensors have no meaning alone."""
    store, pattern = saved(), "*.codes"
    assert store.get("r@1").matching(pattern) == INNER[:1]
    assert bits(store.read("r@1", keys=[pattern])["model"]["a"]["w"]) == bits(scaled(1, 8, 16))
    store.save(state(2), run="r", step=2)
    assert store.thin("r@1", drop=[pattern]).entries == 1


@pytest.mark.parametrize("pattern", ["model.a.w.", "*.w.other", "w"])
def test_a_pattern_that_matches_neither_a_wrapper_nor_its_tensors_is_reported(tmp_path: Path, pattern: str) -> None:
    store = saved()
    calls: list[Any] = [
        lambda: details(store, "r@1", (pattern,)),
        lambda: store.read("r@1", keys=[pattern]),
        lambda: store.export("r@1", tmp_path / "out", format="safetensors", keys=[pattern]),
    ]
    for call in calls:
        with pytest.raises(MissingKey, match="matches"):
            call()


@OUTER
def test_a_wrapper_is_frozen_and_ignored_by_its_key(pattern: str) -> None:
    store = saved()
    again = store.save(state(), run="r", step=2, frozen=[pattern])
    assert again.commit.committed.bytes_written == 0
    template = state(2, options=Options(Mode.EXACT))
    before = bits(template["model"]["a"]["w"])
    loaded = store.load(template, "r@1", ignore_mismatched=[pattern])
    assert loaded.mismatched_keys == ("model.a.w",)
    assert bits(template["model"]["a"]["w"]) == before


def test_state_of_an_optimizer_is_selected_by_the_key_of_its_wrapper() -> None:
    store, model = small(), nn.Linear(16, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": scaled(3, 8, 16)}
    save_model_and_optim_state(store, model, optimizer, run="r", step=1)
    for pattern in ("weight.momentum_buffer", "optim.state.*_buffer"):
        found = unshard_optim_state(store, "r@1", keys=[pattern], by_name=True)
        assert bits(found["state"]["weight"]["momentum_buffer"]) == bits(scaled(3, 8, 16))


def test_diff_counts_a_tensor_with_the_key_of_a_changed_wrapper_once() -> None:
    store = small()
    for step, mode in enumerate((Mode.FAST, Mode.EXACT)):
        store.save({"a": {"w": scaled(1, 8, 16, options=Options(mode))}, "a.w": torch.ones(4)}, step=step)
    found = store.diff("default@0", "default@1")
    assert found.changes == (Change("a.w", "description", 0),)
    assert found.bytes_unchanged == sum(one.bytes for one in store.get("default@1").tensors.values())


def test_diff_reports_a_wrapper_whose_description_changed() -> None:
    store = saved()
    store.save(state(options=Options(Mode.EXACT)), run="r", step=2)
    found = store.diff("r@1", "r@2")
    assert found.changes == (Change("model.a.w", "description", 0),)
    assert {*found.unchanged} == {*INNER, "model.a.b"}
    assert found.bytes_unchanged == sum(one.bytes for one in store.get("r@1").tensors.values())
    store.save(state(2), run="r", step=3)
    found = store.diff("r@2", "r@3")
    assert [change.what for change in found.changes] == ["description", "bytes", "bytes", "bytes"]
    assert store.diff("r@1", "r@3").changed == (*INNER[:2], "model.a.b")
