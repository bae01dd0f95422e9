"""Durations have a single parser, and every number needs a unit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from casckpt.base.units import Duration, format_duration, parse_size, seconds_of
from casckpt.errors import InvalidInput


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("12h", 43200),
        ("7d", 604800),
        ("2w", 1209600),
        ("0s", 0),
        ("0", 0),
        (0, 0),
        ("1.5h", 5400),
        (" 7d ", 604800),
        (timedelta(days=7), 604800),
        (timedelta(0), 0),
    ],
)
def test_durations_are_parsed_into_seconds(duration: Duration, seconds: float) -> None:
    assert seconds_of(duration, "min-age") == seconds


@pytest.mark.parametrize(
    "duration",
    [
        *("", "d", "-7d", "7 d", "7D", "1e3s", "7d12h", "inf", "nans", "9" * 30 + "d", "\u0663d", "-0.5"),
        *(timedelta(-1), -1, float("nan"), float("inf"), None, True, False, b"7d", ["7d"]),
    ],
)
def test_an_invalid_duration_is_rejected(duration: Any) -> None:
    with pytest.raises(InvalidInput, match=r"min-age: .* is not a duration with a unit"):
        seconds_of(duration, "min-age")


@pytest.mark.parametrize("bare", ["7", " 7 ", 7, 0.5, 7.0, "0.5"])
def test_the_error_for_a_number_without_a_unit_suggests_a_duration(bare: Any) -> None:
    """Regression: ``--keep-within 7`` meant seconds and forgot a week of checkpoints."""
    text = str(bare).strip()
    with pytest.raises(InvalidInput, match=f"pass {text}s or {text}d"):
        seconds_of(bare, "keep-within")


@pytest.mark.parametrize("long", ["36501d", "999999999w", timedelta.max])
def test_a_duration_beyond_the_range_of_clocks_is_rejected(long: Duration) -> None:
    """Regression: such an early time raised OverflowError."""
    assert seconds_of("36500d") == 36500 * 86400
    with pytest.raises(InvalidInput, match=r"keep-within: .* is too long: pass 36500d or less"):
        seconds_of(long, "keep-within")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (90, "90s"), (1.5, "1.5s"), (900, "15m"), (7200, "2h"), (86400, "1d"), (90000, "25h"), (604800, "7d")],
)
def test_seconds_are_formatted_as_they_are_parsed(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert seconds_of(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512B", 512),
        ("1KiB", 1024),
        ("1MiB", 1 << 20),
        ("1.5MiB", 3 << 19),
        (" 32 mib ", 32 << 20),
        ("5GB", 5 * 10**9),
        ("2G", 2 << 30),
        ("0.1GB", 10**8),
    ],
)
def test_a_size_is_parsed(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e3", "5 parsecs", "1..5MB", "٣MB", "1" * 16])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a size"):
        parse_size(text)
