"""The model is found in every layout in which training code saves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.errors import InvalidInput, MissingKey
from casckpt.store.store import Store
from tests.frontends.views.test_view import LLAMA, OPTIMIZER, W, flat, names, view

LAYOUTS: dict[str, Any] = {
    "the model alone": LLAMA,
    "training state of ours": {"model": LLAMA, "optim": OPTIMIZER, "train": {0: {"rng": W}}},
    "a loop of one's own": {"model": LLAMA, "optimizer": OPTIMIZER, "scheduler": {"last": W}, "epoch": 3},
    "a step as a tensor": {"model": LLAMA, "optimizer": OPTIMIZER, "step": torch.tensor(3)},
    "another name": {"net": LLAMA, "optimizer": OPTIMIZER},
    "a file of Lightning's": {
        "state_dict": {f"net.{key}": value for key, value in LLAMA.items()},
        "optimizer_states": [OPTIMIZER], "pytorch-lightning_version": "2", "epoch": 1,
    },
    "Lightning in a store": {
        "model": {f"net.{key}": value for key, value in LLAMA.items()}, "lightning": {"optimizer_states": [OPTIMIZER]},
    },
    "the optimizer beside the names of the model": {
        key.removeprefix("model."): value for key, value in LLAMA.items()
    } | {"optimizer": OPTIMIZER, "scheduler": {"last": W}, "epoch": 3},
    "DDP": {"model": {f"module.{key}": value for key, value in LLAMA.items()}, "optim": OPTIMIZER},
    "DDP around torch.compile": {f"module._orig_mod.{key}": value for key, value in LLAMA.items()},
    "activation checkpointing": {
        "model": {key.replace("layers.0", "layers.0._checkpoint_wrapped_module"): value for key, value in LLAMA.items()}
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_found_in_saved_training_states(store: Store, layout: str) -> None:
    found = view(store, LAYOUTS[layout], model=True)
    assert [one.name.removeprefix("model.") for one in found.tensors] == [
        n.removeprefix("model.") for n in sorted(LLAMA)
    ]
    tensors = {one.name: one.entry.key for one in found.tensors}
    assert all(key.startswith(found.prefix) for key in tensors.values())
    everything = store.get("latest").tensors.keys()
    assert {*tensors.values(), *found.left_out} >= everything, "everything that is hidden is named"


UNCLEAR: dict[str, tuple[Any, tuple[str, ...]]] = {
    "two models": ({"policy": LLAMA, "reference": LLAMA}, ("policy.", "reference.")),
    "averaged weights": ({"model": LLAMA, "ema": LLAMA, "optim": OPTIMIZER}, ("model.", "ema.")),
    "a head beside": ({"model": {"embed": {"weight": W}}, "lm_head": {"weight": W}}, ("model.", "lm_head.")),
    "flat names of both": (LLAMA | flat("optim.state.w.exp_avg"), ("model.",)),
    "flat names of an optimizer": (flat("embed.w", "optim.state.w.exp_avg"), ("embed.",)),
    "several attributes of Lightning's": (
        {"state_dict": flat("net.w", "loss.weight"), "pytorch-lightning_version": "2"},
        ("state_dict.net.", "state_dict.loss."),
    ),
}


@pytest.mark.parametrize("layout", UNCLEAR)
def test_a_checkpoint_with_several_possible_models_is_rejected(store: Store, layout: str) -> None:
    state, choices = UNCLEAR[layout]
    with pytest.raises(InvalidInput, match="several parts of default@0 may be the model") as caught:
        view(store, state, model=True)
    for choice in choices:
        assert f"--strip-prefix {choice}" in str(caught.value)
        assert names(store, state, strip_prefix=choice, model=True)


def test_a_part_of_a_model_can_have_the_name_of_a_part_of_the_training(store: Store) -> None:
    assert names(store, flat("scaler.weight", "head.weight"), model=True).keys() == {"scaler.weight", "head.weight"}


def test_a_checkpoint_without_a_model_is_rejected(store: Store) -> None:
    with pytest.raises(MissingKey, match="does not hold a model's weights, but keys below optim"):
        view(store, {"optim": OPTIMIZER, "epoch": 1}, model=True)
    with pytest.raises(MissingKey, match="does not hold a model's weights; "):
        view(store, {"epoch": 1}, model=True)


@pytest.mark.parametrize(
    "key",
    [
        f"h.0.{part}.weight"
        for part in ("base_layer", "modules_to_save.x", "lora_A.x", "lora_B.x", "lora_embedding_A", "lora_embedding_B")
    ],
)
def test_a_model_with_adapters_is_rejected_unless_it_is_selected_explicitly(store: Store, key: str) -> None:
    with pytest.raises(InvalidInput, match="Merge the adapter") as caught:
        view(store, {"model": flat("h.0.weight", key)}, model=True)
    assert caught.value.key == key
    assert key in names(store, {"model": flat(key)}, strip_prefix="model", model=True), (
        "the caller can override the check"
    )
    assert key in names(store, flat(key), model=True), "an imported folder can be exported again"
