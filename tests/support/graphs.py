"""Checks whether autograd detects a write into a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_noticed(tensor: torch.Tensor, load: Callable[[], Any]) -> bool:
    """Report whether autograd rejects a backward pass through values that were computed before ``load``."""
    weight = torch.ones_like(tensor, requires_grad=True)
    result = (weight * tensor).sum()
    load()
    try:
        result.backward()  # type: ignore[no-untyped-call]  # torch's own
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False
