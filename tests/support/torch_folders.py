"""Folders and files that torch writes."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.support.dcp import save
from tests.support.together import numbers


class Colour(enum.Enum):
    """A class that torch's restricted unpickler does not know."""

    RED = 1


def example() -> dict[str, Any]:
    return {
        "model": {"w": numbers("w", 300, 100), "half": numbers("half", 7).bfloat16(), "scalar": torch.tensor(3)},
        "optim": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "empty": torch.zeros(0, 4), "pair": (torch.ones(3), "x"), "none": None, "list": [1, 2],
        "complex": torch.ones(2) * 1j,
    }  # fmt: skip


def stock(path: Path, state: Any) -> Path:
    """Write a state as a DCP folder, with torch's own writer."""
    save(state, FileSystemWriter(path))
    return path


def stringed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as DCP returns it, with string keys."""
    found = dict(state)
    found["optim"] = {**state["optim"], "state": {str(k): v for k, v in state["optim"]["state"].items()}}
    return found
