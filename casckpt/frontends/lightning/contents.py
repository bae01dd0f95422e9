"""The contents of Lightning's checkpoint, and where each part of it lies in a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from casckpt.checkpoint.handle import Checkpoint
from casckpt.frontends.lightning.pointer import AnyPath
from casckpt.frontends.new_files import new_file
from casckpt.frontends.stores import AnyStore, as_store

WEIGHTS, REST = "model", "lightning"


def to_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Give what is saved of Lightning's dict: weights where every front end has them, all else beside them."""
    rest = dict(checkpoint)
    weights = rest.pop("state_dict", None)
    return {REST: rest} if weights is None else {WEIGHTS: weights, REST: rest}


def from_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's dict again. Of what another front end saved, the weights."""
    if REST not in state:
        return {"state_dict": dict(state.get(WEIGHTS, state))}
    found = dict(state[REST])
    return {**found, "state_dict": state[WEIGHTS]} if WEIGHTS in state else found


def restore_checkpoint(store: AnyStore, ref: str | Checkpoint, path: AnyPath, *, force: bool = False) -> Path:
    """Write a checkpoint as a file of Lightning's own, for all that reads files by itself.

    ``force``: over what is there. Raises NotFound, Conflict.
    """
    checkpoint = from_state(as_store(store).read(ref))
    target = Path(path)
    with new_file(target, force=force) as temporary:
        torch.save(checkpoint, temporary)
    return target
