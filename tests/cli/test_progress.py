from __future__ import annotations

import io
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
