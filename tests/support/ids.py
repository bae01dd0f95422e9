"""Names for test cases that are the same in every run."""

from __future__ import annotations

import re


def named(value: object) -> str:
    """Return a short string for a value. It contains no object addresses, which differ between runs."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:60]
