"""Saves and loads through torch.distributed.checkpoint, in a single process and on ranks."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    SavePlanner,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

QUIET = "torch.distributed is"  # disabled, unavailable or uninitialized: these tests cause DCP's warning deliberately


def save(state: Any, writer: StorageWriter, **more: Any) -> Metadata:
    """Call `dcp.save` without its warning about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", QUIET)
        found: Metadata = save_state(state, storage_writer=writer, **more)
    return found


def load(state: Any, reader: StorageReader, **more: Any) -> Any:
    """Call `dcp.load`. Return the state that it filled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", QUIET)
        warnings.filterwarnings("ignore", "Please use DTensor instead")  # about ShardedTensor
        load_state(state, storage_reader=reader, **more)
    return state


def failure(call: Callable[[], Any]) -> CheckpointException:
    """Return the CheckpointException of a call. It is not an Exception, so `outcomes` would not catch it."""
    try:
        call()
    except CheckpointException as error:
        return error
    raise AssertionError("nothing failed")


def causes(error: CheckpointException) -> dict[int, BaseException]:
    """Return the failures of all ranks."""
    return {rank: cause for rank, (cause, _) in error.failures.items()}


def failed(call: Callable[[], Any]) -> dict[int, tuple[str, str]]:
    """Return (type, message) of each failure by rank, in a form that a different process can unpickle."""
    return {rank: (type(cause).__name__, str(cause)) for rank, cause in causes(failure(call)).items()}


def forget_plans() -> None:
    """Clear the plans that DCP caches in its classes, so that tests in one process do not share them."""
    for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan",
                 "_cached_metadata"):  # fmt: skip
        getattr(SavePlanner, name, {}).clear()


def zeros(state: Any) -> Any:
    """Return a state with the same structure, filled with zeros."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return [zeros(value) for value in state] if isinstance(state, list) else None


PLAIN: dict[str, Any] = {
    "step": 7, "loss": 0.25, "nan": float("nan"), "name": "x", "flags": [True, None], "pair": (1, "b"),
    "big": 1 << 80, "array": np.arange(3000, dtype=np.int16), "scalar": np.float32(2), "size": torch.Size((1, 2)),
    "dtype": torch.bfloat16, "bytes": b"y" * 9000, "ordered": OrderedDict(a=1), "path": Path("a/b"),
}  # fmt: skip
