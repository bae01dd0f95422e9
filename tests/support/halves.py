"""Combinations of two-valued options. The default run takes half; any two values of two options still meet."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


def half_of(*choices: list[Any]) -> list[Any]:
    """What `pytest.mark.parametrize` takes: all combinations, every other one of them with --full only."""
    numbers = product((0, 1), repeat=len(choices))
    rows = [(sum(row) % 2, [pair[at] for pair, at in zip(choices, row, strict=True)]) for row in numbers]
    return [pytest.param(*values, marks=[pytest.mark.soak] * odd) for odd, values in rows]
