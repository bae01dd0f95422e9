"""Views: the tensors of a checkpoint that a program sees, and their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import casckpt
from casckpt.contents.contents import Contents
from casckpt.errors import CasckptError, InvalidInput, MissingKey
from casckpt.frontends.views.view import Rules, View, view_of
from casckpt.store.store import Store

W = torch.ones(2)


OPTIMIZER = {"state": {0: {"exp_avg": W, "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def view(store: Store, state: Any, **rules: Any) -> View:
    """Save a state. Return the view of the checkpoint under these rules."""
    saved = store.save(state, step=0, overwrite=True)
    return view_of(Contents.open(store.repository, saved.commit), Rules(**rules))


def names(store: Store, state: Any, **rules: Any) -> dict[str, str]:
    """Save a state. Return the checkpoint keys of the tensors in a view, by name."""
    return {one.name: one.entry.key for one in view(store, state, **rules).tensors}


def flat(*keys: str) -> dict[str, torch.Tensor]:
    """Return a state with a small tensor for each key."""
    return {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}


LLAMA = flat("model.embed.weight", "model.layers.0.weight")


def test_rules_select_keys_and_then_remove_their_prefix_and_rename_them(store: Store) -> None:
    state = {"model": flat("h.0.w", "h.1.w", "head.w"), "optim": OPTIMIZER}
    assert names(store, state, keys=["model.h.*"], strip_prefix="model") == {
        "h.0.w": "model.h.0.w",
        "h.1.w": "model.h.1.w",
    }
    rename = {r"h\.(\d+)\.(.*)": r"layers.\1.\2", r"layers\..*": "never", "head.w": "w"}
    expected = {"layers.0.w": "model.h.0.w", "layers.1.w": "model.h.1.w", "w": "model.head.w"}
    assert names(store, state, rename=rename, model=True) == expected
    assert names(store, state, rename=lambda name: name.upper(), keys="model.head.w") == {
        "MODEL.HEAD.W": "model.head.w"
    }
    found = view(store, state, strip_prefix="", model=True)
    assert {one.name for one in found.tensors} == store.get("latest").tensors.keys(), "names as they are"


def test_wrapper_prefixes_are_also_removed_from_a_selected_model(store: Store) -> None:
    state = {"policy": flat("module.a", "module._orig_mod.b"), "reference": LLAMA}
    assert names(store, state, strip_prefix="policy", model=True).keys() == {"a", "b"}
    assert names(store, state, strip_prefix="policy").keys() == {"module.a", "module._orig_mod.b"}


@pytest.mark.parametrize(
    ("rules", "kind", "match"),
    [
        ({"keys": ["nothing*"]}, MissingKey, "nothing in default@0 matches 'nothing"),
        ({"strip_prefix": "mod"}, MissingKey, "default@0 has no tensors below 'mod.'"),
        ({"rename": {r".*\.w": "w"}}, InvalidInput, "would both be named 'w'"),
        ({"rename": {r".*\.w": ""}}, InvalidInput, "would be empty"),
        ({"rename": {"(": "w"}}, InvalidInput, "not a regular expression"),
    ],
)
def test_invalid_rules_are_rejected(store: Store, rules: Any, kind: type[CasckptError], match: str) -> None:
    with pytest.raises(kind, match=match):
        view(store, {"model": flat("a.w", "b.w")}, **rules)


def test_a_view_that_omits_per_rank_values_names_their_rank(store: Store) -> None:
    found = view(store, {"model": LLAMA, "train": {"rng": casckpt.PerRank(W), "lr": 0.1}}, model=True)
    assert found.left_out == ("train.lr", "train.rng (of rank 0)")
