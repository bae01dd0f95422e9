"""Durations, times and sizes with units. A duration needs a unit, because a bare number could mean days or seconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from casckpt.errors import InvalidInput

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Duration: TypeAlias = timedelta | str | Literal[0]
"""A `timedelta`, a string with a number and a unit ("90s", "15m", "12h", "7d", "2w"), or 0."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MOST = 36500 * 86400  # 100 years; a date that long ago is still valid
_DURATION_RE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw])")
_SIZE_UNITS: dict[str, int] = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE_RE = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?\s*([A-Za-z]*)")
_SHOWN_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def seconds_of(duration: Duration, what: str = "") -> float:
    """Return a duration in seconds. ``what`` names it in error messages.

    Raises InvalidInput for a number without a unit, a negative duration, or one of more than 100 years.
    """
    seconds = _seconds(duration)
    given = f"{what}: {str(duration)[:40]!r}" if what else repr(str(duration)[:40])
    if seconds is None:
        hint = f": pass {_bare(duration)}s or {_bare(duration)}d if you mean that" if _bare(duration) else ""
        raise InvalidInput(f"{given} is not a duration with a unit, such as 90s, 15m, 12h, 7d or 2w{hint}")
    if seconds > _MOST:
        raise InvalidInput(f"{given} is too long: pass 36500d or less")
    return seconds


def optional_seconds(duration: Duration | None, what: str) -> float | None:
    """Return a duration in seconds, or None for None. See `seconds_of`."""
    return None if duration is None else seconds_of(duration, what)


def format_duration(seconds: float) -> str:
    """Format seconds as `seconds_of` parses them, in the largest unit that gives a whole number: 7200 is ``2h``."""
    if not seconds:
        return "0"
    unit = next((unit for unit in "dhm" if seconds % _SECONDS[unit] == 0), "s")
    return f"{seconds / _SECONDS[unit]:.10g}{unit}"


def _seconds(duration: Any) -> float | None:
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
        return seconds if seconds >= 0 else None
    if isinstance(duration, int | float) and not isinstance(duration, bool) and duration == 0:
        return 0.0
    if not isinstance(duration, str):
        return None
    match = _DURATION_RE.fullmatch(duration.strip())
    if match is not None:
        return float(match[1]) * _SECONDS[match[2]]
    return 0.0 if duration.strip() == "0" else None


def _bare(duration: Any) -> str:
    """Return the value as a string if it is a number without a unit. Otherwise, return ""."""
    text = str(duration).strip()
    return text if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) else ""


def time_of(microseconds: int) -> datetime:
    """Convert microseconds since the epoch, the time unit of records, to a datetime in UTC."""
    return _EPOCH + timedelta(microseconds=microseconds)


def format_size(nbytes: int) -> str:
    """Format a number of bytes: 512 B, 1.5 KiB, 32.0 MiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    number, unit = nbytes / 1024, 0
    while abs(number) >= 999.95 and unit < len(_SHOWN_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_SHOWN_UNITS[unit]}"


def parse_size(text: str) -> int:
    """Parse ``4096``, ``512KiB``, ``1.5MiB`` or ``5GB`` (10**9, as Hugging Face counts). Raises InvalidInput."""
    match = _SIZE_RE.fullmatch(text.strip())
    unit = _SIZE_UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise InvalidInput(f"{text[:40]!r} is not a size: pass a number and a unit, such as 4096, 512KiB, 1MiB or 5GB")
    fraction = match[2] or ""
    return int(match[1] + fraction) * unit // int(10 ** len(fraction))
