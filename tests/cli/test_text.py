from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casckpt.cli.text import Column, bold, cell_width, count, moment, printable, shortened, size, table


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


_COLUMNS = (Column("ID", fixed=True), Column("RUN"), Column("STEP", "right", fixed=True), Column("NOTES"))


def printed(capsys: pytest.CaptureFixture[str], *rows: tuple[str, ...]) -> list[str]:
    table(_COLUMNS, rows)
    return capsys.readouterr().out.splitlines()


def test_a_table_is_aligned_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, ("a1", "seven", "7", ""), ("b2", "x", "1000", "best")) == [
        "ID  RUN    STEP  NOTES",
        "a1  seven     7",
        "b2  x      1000  best",
    ]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)


def test_in_a_pipe_each_row_is_one_complete_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert printed(capsys, ("abcdef", "r" * 200, "7", "n" * 90))[1] == f"abcdef  {'r' * 200}     7  {'n' * 90}"


def test_a_long_cell_ends_in_an_ellipsis_and_leaves_room_for_other_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch, 30)
    lines = printed(capsys, ("abcdef", "r" * 20, "7", "n" * 9), ("x", "\u6f22\u5b57\u6f22\u5b57\u6f22", "8", ""))
    assert lines[1:] == ["abcdef  rrrrrr…     7  nnnnnn…", "x       \u6f22\u5b57\u6f22…     8"]


def test_an_optional_column_is_dropped_before_other_columns_become_empty(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = (Column("ID", fixed=True, spare=2), Column("RUN"), Column("NEW", "right", fixed=True, spare=1))
    shown = {}
    for width in (40, 32, 20, 19):
        on_a_terminal(monkeypatch, width)
        table(columns, [("abcdef", "r" * 24, "4.0 KiB")])
        shown[width] = capsys.readouterr().out.splitlines()[1]
    assert shown == {
        40: f"abcdef  {'r' * 22}…  4.0 KiB", 32: f"abcdef  {'r' * 14}…  4.0 KiB",
        20: f"abcdef  {'r' * 11}…", 19: f"{'r' * 18}…",
    }  # fmt: skip


def test_a_line_that_is_still_too_long_is_truncated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch, 15)
    assert printed(capsys, ("abcdef", "abcd", "7", "abcdef")) == ["ID      RUN  S…", "abcdef  ab…   …"]


_ROWS = st.lists(st.tuples(*[st.text(max_size=60)] * 4), max_size=4)
_ALL_FIT = 4 * 60 * len("\\U0001b2fc") + 100  # columns: no character needs more than its escape


def on_a_terminal_of(columns: int, rows: list[tuple[str, str, str, str]]) -> str:
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out, contextlib.redirect_stdout(out):
        on_a_terminal(patch, columns)
        table(_COLUMNS, rows)
        return out.getvalue()


@given(_ROWS, st.integers(20, 300))
def test_no_line_is_longer_than_a_terminal_is_wide(rows: list[tuple[str, str, str, str]], columns: int) -> None:
    assert all(cell_width(line) <= columns for line in on_a_terminal_of(columns, rows).split("\n"))


@given(_ROWS)
@example([("", "0\x1f\U00018d09\U0001b2fc", "\U00018d09\U0002ebe1", 30 * "\U00018d09")])  # escapes in older Pythons
def test_text_that_fits_its_column_is_not_truncated(rows: list[tuple[str, str, str, str]]) -> None:
    wanted = [[column.title for column in _COLUMNS], *([printable(cell) for cell in row] for row in rows)]
    shown = on_a_terminal_of(_ALL_FIT, rows)
    assert "".join(shown.split()) == "".join("".join(cell.split()) for row in wanted for cell in row)
