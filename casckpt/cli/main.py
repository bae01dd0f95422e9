"""The ``casckpt`` command. It finds and runs subcommands, and reports errors."""

from __future__ import annotations

import difflib
import pkgutil
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

import click

from casckpt._version import __version__
from casckpt.cli import commands
from casckpt.cli.failures import Reporter

NAME: Final = "casckpt"
_ALIASES: Final = {"ls": "list"}
_BESIDE: Final = {
    "cache": "settings",
    "diff": "show",
    "doctor": "verify",
    "follow": "watch",
    "init": "settings",
    "merge": "import_",
    "reindex": "settings",
    "repair": "verify",
    "restore": "forget",
    "serve": "export",
    "sign": "verify",
    "stats": "report",
    "thin": "gc",
    "transactions": "list",
}
"""Commands that are defined in another command's module: their names, each with the module's name."""


_FOREIGN = {"delete": ["forget"], "remove": ["forget"], "rm": ["forget"], "prune": ["gc"], "info": ["show"]}
"""Names that other programs use for these commands. They are used in the hint for an unknown command."""


@cache
def command_modules() -> dict[str, str]:
    """Return the command names, each with the name of the command's module."""
    found = (module.name for module in pkgutil.iter_modules(commands.__path__))
    return {name.rstrip("_"): name for name in found} | _BESIDE


class Commands(click.Group):
    """The group of all commands.

    It imports a command's module only on use, so that most commands start without torch.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, sorted."""
        return sorted(command_modules())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with this name, or None if there is no such command."""
        name = _ALIASES.get(cmd_name, cmd_name)
        module = command_modules().get(name)
        if module is None:
            return None
        holder = import_module(f"{commands.__name__}.{module}")
        found: click.Command = getattr(holder, name if name in _BESIDE else "command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` starts with.

        Raises UsageError, with similar names, if there is no such command.
        """
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            near = _FOREIGN.get(args[0]) or difflib.get_close_matches(args[0], command_modules())
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"unknown command {args[0]!r}{meant}", ctx)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,  # click's own options
    ) -> Any:
        """Run a command and exit with its status.

        Without ``standalone_mode``, return the result or raise the error.
        """
        given = list(sys.argv[1:] if args is None else args)
        run = super().main
        if not standalone_mode:
            return run(given, NAME, complete_var, standalone_mode=False, **extra)
        try:
            result = run(given, NAME, complete_var, standalone_mode=False, **extra)
            status = result if isinstance(result, int) else 0
            if sys.stdout is not None:  # None if stdout was closed when the process started
                sys.stdout.flush()  # a closed pipe must fail here, not when the process exits
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the error is reported
            status = Reporter(as_json="--json" in given, debug="--debug" in given).report(error)
        sys.exit(status)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Store PyTorch checkpoints without storing identical bytes twice.

    STORE is a folder or a URL. Omit it if you pass -s or set CASCKPT_STORE. REF names a checkpoint: an id (or at least
    its first 6 hex digits), RUN@STEP, RUN@latest, latest, or tag:NAME. Commands that accept several checkpoints also
    accept step ranges: RUN@100..500, RUN@501.., RUN@..500 and RUN@..

    Exit status: 0 success, 1 failure, 2 wrong usage, 3 not found, 4 damaged data, 5 conflict, 130 interrupted.
    """


def main() -> None:
    """Run this process's command line."""
    cli()
