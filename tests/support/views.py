"""Small states, and the views of checkpoints that contain them."""

from __future__ import annotations

from typing import Any

import torch

from casckpt.contents.contents import Contents
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
