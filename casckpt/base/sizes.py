"""Sizes in bytes as text: 4096, 512KiB, 1.5 MiB."""

from __future__ import annotations

import re

from casckpt.errors import InvalidInput

_UNITS: dict[str, int] = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?\s*([A-Za-z]*)")


_SHOWN = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_size(nbytes: int) -> str:
    """Format bytes for people: 512 B, 1.5 KiB, 32.0 MiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    number, unit = nbytes / 1024, 0
    while abs(number) >= 999.95 and unit < len(_SHOWN) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_SHOWN[unit]}"


def parse_size(text: str) -> int:
    """Parse ``4096``, ``512KiB``, ``1.5MiB`` or ``5GB`` (10**9, as Hugging Face counts). Raises InvalidInput."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise InvalidInput(f"{text[:40]!r} is not a size: give a number and a unit, as 4096, 512KiB, 1MiB or 5GB")
    fraction = match[2] or ""
    return int(match[1] + fraction) * unit // int(10 ** len(fraction))
