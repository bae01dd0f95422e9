from __future__ import annotations

import io
import re
import sys

import pytest

from casckpt.cli.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("total", [None, 4096])
@pytest.mark.parametrize("of_bytes", [True, False])
def test_a_progress_bar_is_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, total: int | None, of_bytes: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("[reading]", of_bytes=of_bytes) as shown:
        shown(1024, total)
        shown(4096, total)
    assert "[reading]" in terminal.getvalue()


def test_a_finished_progress_bar_disappears_even_outside_a_with_block(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    shown = progress_bar("saving")
    shown(4096, 8192)
    shown(8192, 8192)
    assert "8.0/8.0 KiB" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is empty again


def test_no_progress_bar_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("reading") as shown:
        shown(10, 20)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("columns", [40, 80])
def test_a_progress_bar_fits_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress_bar("exporting") as shown:
        shown(1 << 30, 3 << 30)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", terminal.getvalue())]
    assert max(map(len, lines)) <= columns
    assert any("1.0/3.0 GiB" in line and "━" in line for line in lines)
    assert any("GiB/s" in line or "?" in line for line in lines) == (columns == 80)


def test_progress_is_logged_every_half_minute_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 110.0, 131.0, 132.0, 161.0, 200.0, 230.0])
    monkeypatch.setattr("casckpt.cli.progress.time.monotonic", lambda: next(clock))
    with progress_bar("copying") as shown:
        for number in range(1, 5):
            shown(1024 * number, 4096)
    assert capsys.readouterr().err.splitlines() == [
        "casckpt: copying: 2.0 KiB of 4.0 KiB (50%), 66 B/s",
        "casckpt: copying: 4.0 KiB of 4.0 KiB (100%), 67 B/s",
    ]
    with progress_bar("deleting", of_bytes=False) as shown:
        shown(7, None)
    assert capsys.readouterr().err == "casckpt: deleting: 7\n"
