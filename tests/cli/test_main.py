"""The command line finds the command, or names the most similar one."""

from __future__ import annotations

from tests.cli.conftest import Run


def test_the_error_for_a_mistyped_command_suggests_a_command(run: Run) -> None:
    assert "unknown command 'lst'; did you mean list?" in run("lst", status=2).stderr
    assert "did you mean forget?" in run("delete", status=2).stderr
    assert "did you mean" not in run("frobnicate", status=2).stderr
