"""Combinations of two-valued options. The default run uses half of them and still covers every pair of values."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


def half_of(*choices: list[Any]) -> list[Any]:
    """Parametrize a test with all combinations. Every other combination runs only with --full."""
    numbers = product((0, 1), repeat=len(choices))
    rows = [(sum(row) % 2, [pair[at] for pair, at in zip(choices, row, strict=True)]) for row in numbers]
    return [pytest.param(*values, marks=[pytest.mark.soak] * odd) for odd, values in rows]
