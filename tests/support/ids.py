"""Cases of parametrized tests: their names, and half of all combinations of options."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest


def named(value: object) -> str:
    """Return a short string for a value. It contains no object addresses, which differ between runs."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:60]


def half_of(*choices: list[Any]) -> list[Any]:
    """Parametrize a test with all combinations. Every other combination runs only with --full."""
    numbers = product((0, 1), repeat=len(choices))
    rows = [(sum(row) % 2, [pair[at] for pair, at in zip(choices, row, strict=True)]) for row in numbers]
    return [pytest.param(*values, marks=[pytest.mark.soak] * odd) for odd, values in rows]
