"""Folders and files that torch writes."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.together import numbers


def example() -> dict[str, Any]:
    return {
        "model": {"w": numbers("w", 300, 100), "half": numbers("half", 7).bfloat16(), "scalar": torch.tensor(3)},
        "optim": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "empty": torch.zeros(0, 4), "pair": (torch.ones(3), "x"), "none": None, "list": [1, 2],
        "complex": torch.ones(2) * 1j,
    }  # fmt: skip


def stringed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as DCP returns it, with string keys."""
    found = dict(state)
    found["optim"] = {**state["optim"], "state": {str(k): v for k, v in state["optim"]["state"].items()}}
    return found
