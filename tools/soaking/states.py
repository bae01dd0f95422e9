"""The saved states. The content of each follows from its run and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

RUNS = ("alpha", "beta/lora")
LONG = "long"  # the run of a single process
CELL = 4096


def state(run: str, step: int) -> dict[str, Any]:
    """Return the contents of run@step: constant parts, parts in which few numbers change, new parts, and plain data."""
    made = torch.Generator().manual_seed(sum(run.encode()))
    told = torch.randn(16 * CELL, generator=made).bfloat16()
    told[:: max(1, 997 - step % 7)] += step % 251
    fresh = torch.Generator().manual_seed(1_000_003 * step + len(run))
    return {
        "model": {"kept": torch.randn(32 * CELL // 4, generator=made), "told": told},
        "optim": {"m": torch.randn(80 * CELL // 4, generator=fresh)},
        "step": step,
    }


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two nested states are equal, bit for bit."""
    if one.keys() != other.keys():
        return False
    return all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return same(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
