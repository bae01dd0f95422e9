from __future__ import annotations

import io
import re
import sys

import pytest

from casckpt.cli.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("total", [None, 4096])
@pytest.mark.parametrize("of_bytes", [True, False])
def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch, total: int | None, of_bytes: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("[reading]", total, of_bytes=of_bytes) as done:
        done(1024)
        done(3072)
    assert "[reading]" in terminal.getvalue()


def test_what_is_to_come_may_be_said_later(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("reading", None) as done:
        done.expect(8192)
        done(4096)
    assert "4.0/8.0 KiB" in terminal.getvalue()


def test_nobody_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", 10) as done:
        done.expect(20)
        done(10)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("columns", [40, 80])
def test_a_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress("exporting", 3 << 30) as done:
        done(1 << 30)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", terminal.getvalue())]
    assert max(map(len, lines)) <= columns
    assert any("1.0/3.0 GiB" in line and "━" in line for line in lines)
    assert any("GiB/s" in line or "?" in line for line in lines) == (columns == 80)


def test_a_log_gets_a_line_each_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 110.0, 131.0, 132.0, 161.0, 200.0, 230.0])
    monkeypatch.setattr("casckpt.cli.progress.time.monotonic", lambda: next(clock))
    with progress("copying", 4096) as done:
        for _ in range(4):
            done(1024)
    assert capsys.readouterr().err.splitlines() == [
        "casckpt: copying: 2.0 KiB of 4.0 KiB (50%), 66 B/s",
        "casckpt: copying: 4.0 KiB of 4.0 KiB (100%), 67 B/s",
    ]
    with progress("deleting", None, of_bytes=False) as done:
        done(7)
    assert capsys.readouterr().err == "casckpt: deleting: 7\n"
