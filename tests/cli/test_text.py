from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.cli.text import count, moment, printable, shortened, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (90_856_960, "86.6 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 70, "1024.0 EiB"),
    ],
)
def test_a_size_is_short(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@given(st.integers(0, 1 << 69))
def test_no_size_takes_more_than_ten_places(nbytes: int) -> None:
    assert len(size(nbytes)) <= 10


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(text, lines=True).count("\n") == text.count("\n")
    assert printable(printable(text)) == printable(text)


def test_words_for_numbers_and_times() -> None:
    assert (count(1, "blob"), count(0, "blob")) == ("1 blob", "0 blobs")
    assert moment("2026-11-21T04:12:59+02:00") == "2026-11-21 02:12"
    assert shortened(["a", "b", "c"], 3) == ["a", "b", "c"]
    assert shortened(["a", "b", "c"], 2) == ["a", "b", "... and 1 more (--json lists all)"]
