from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casckpt.cli.text import Column, bold, count, moment, printable, shortened, size, table


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
def test_sizes_are_printed_concisely(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@given(st.integers(0, 1 << 69))
def test_sizes_have_at_most_ten_characters(nbytes: int) -> None:
    assert len(size(nbytes)) <= 10


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(text, lines=True).count("\n") == text.count("\n")
    assert printable(printable(text)) == printable(text)


def test_numbers_and_times_are_printed_in_a_readable_form() -> None:
    assert (count(1, "blob"), count(0, "blob")) == ("1 blob", "0 blobs")
    assert moment("2026-11-21T04:12:59+02:00") == "2026-11-21 02:12"
    assert shortened(["a", "b", "c"], 3) == ["a", "b", "c"]
    assert shortened(["a", "b", "c"], 2) == ["a", "b", "... and 1 more (--json lists all)"]


def test_titles_are_bold_unless_styles_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b[1m" in bold("x")
    monkeypatch.setenv("TERM", "dumb")
    assert bold("x") == "x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert bold("x") == "x"


_COLUMNS = (Column("ID"), Column("RUN"), Column("STEP", "right"), Column("NOTES"))


def printed(capsys: pytest.CaptureFixture[str], *rows: tuple[str, ...]) -> list[str]:
    table(_COLUMNS, rows)
    return capsys.readouterr().out.splitlines()


def test_a_table_is_aligned_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, ("a1", "seven", "7", ""), ("b2", "x", "1000", "best")) == [
        "ID  RUN    STEP  NOTES",
        "a1  seven     7",
        "b2  x      1000  best",
    ]


def test_each_row_is_one_complete_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert printed(capsys, ("abcdef", "r" * 200, "7", "n" * 90))[1] == f"abcdef  {'r' * 200}     7  {'n' * 90}"


def test_columns_of_wide_characters_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, ("abcdef", "r" * 6, "7", ""), ("x", "\u6f22\u5b57", "8", ""))
    assert lines[1:] == ["abcdef  rrrrrr     7", "x       \u6f22\u5b57       8"]


_ROWS = st.lists(st.tuples(*[st.text(max_size=60)] * 4), max_size=4)


@given(_ROWS)
@example([("", "0\x1f\U00018d09\U0001b2fc", "\U00018d09\U0002ebe1", 30 * "\U00018d09")])  # escapes in older Pythons
def test_a_table_contains_all_text(rows: list[tuple[str, str, str, str]]) -> None:
    wanted = [[column.title for column in _COLUMNS], *([printable(cell) for cell in row] for row in rows)]
    with io.StringIO() as out, contextlib.redirect_stdout(out):
        table(_COLUMNS, rows)
        shown = out.getvalue()
    assert "".join(shown.split()) == "".join("".join(cell.split()) for row in wanted for cell in row)
