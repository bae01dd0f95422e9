"""Converts the errors of commands to exit statuses and messages on stderr. Each message names the next step."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import click

from casckpt.cli.text import printable
from casckpt.errors import CasckptError

FAILED: Final = 1
INTERRUPTED: Final = 130
_HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())  # its message is the help text


@dataclass
class Reporter:
    """Reports the error of a command, as JSON too if ``as_json``, and with its traceback if ``debug``."""

    as_json: bool
    debug: bool

    def report(self, error: BaseException) -> int:
        """Report an error, and return the exit status."""
        if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError | KeyboardInterrupt):
            error = error.__cause__  # click interprets EOFError as the end of user input
        if self.debug:
            traceback.print_exception(error)
        if isinstance(error, BrokenPipeError):
            return _reader_is_gone()
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))  # such as what gc did before the error
        if isinstance(error, KeyboardInterrupt | click.Abort):
            return self._say("interrupted", f"interrupted{notes}", INTERRUPTED)
        if isinstance(error, CasckptError):
            return self._say(error.kind, f"{error}{notes}", error.exit_status)
        if isinstance(error, click.ClickException):
            _show_usage(error)
            return self._as_json("usage", error.format_message(), error.exit_code)
        from casckpt.base.text import in_one_line

        return self._say("error", f"{in_one_line(error)}{notes}\n{self._hint()}", FAILED)

    def _hint(self) -> str:
        if self.debug:
            return "The traceback above shows where the error occurred. If the next step is not clear, report it."
        return "Rerun the command with --debug to see where the error occurred."

    def _say(self, kind: str, message: str, status: int) -> int:
        click.echo(f"casckpt: {printable(message, lines=True)}", err=True)
        return self._as_json(kind, message, status)

    def _as_json(self, kind: str, message: str, status: int) -> int:
        if self.as_json:
            with suppress(OSError):  # stdout may have failed
                click.echo(json.dumps({"error": {"kind": kind, "message": message}}, indent=2))
        return status


def _show_usage(error: click.ClickException) -> None:
    if isinstance(error, _HELP):
        error.show()
        return
    click.echo(f"casckpt: {printable(error.format_message())}", err=True)
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        click.echo(context.get_usage(), err=True)
    click.echo(f"Try '{context.command_path if context else 'casckpt'} --help'.", err=True)


def _reader_is_gone() -> int:
    """Handle a closed pipe (``casckpt list | head``), which is not an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes stdout once more when it exits
    except OSError:
        pass  # stdout is not a file, for example in tests
    finally:
        os.close(nowhere)
    return FAILED
