"""The reference of the command line: what ``--help`` prints for each command, with shared options only once."""

from __future__ import annotations

from copy import copy

import click

from casckpt.cli.main import NAME, cli
from casckpt.cli.session import COMMON, ON_STORES, REQUIRE_SIGNATURE
from casckpt.cli.types import keep_options

WIDTH = 88
GROUPS = {
    "All commands": COMMON,
    "All commands except cache": ON_STORES,
    "export, follow, merge, serve, verify": [REQUIRE_SIGNATURE],
    "Retention rules of gc and thin": click.command("rules")(keep_options(lambda: None)).params,
}
"""Options that many commands share."""


def names() -> list[str]:
    """Return the names of all commands, sorted."""
    with click.Context(cli) as context:
        return cli.list_commands(context)


def command_of(name: str) -> click.Command:
    """Return a command by its name. Raises KeyError."""
    with click.Context(cli) as context:
        command = cli.get_command(context, name)
    if command is None:
        raise KeyError(name)
    return command


def sections() -> str:
    """Return the sections of the page: the shared options, then each command."""
    return "\n".join(
        [_section("Shared options", _shared()), *(_section(f"{NAME} {name}", _own(name)) for name in names())]
    )


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.strip()}\n```\n"


def _own(name: str) -> str:
    """Return the help of a command without the shared options."""
    shared = {option.name for options in GROUPS.values() for option in options}
    own = copy(command_of(name))
    own.params = [param for param in own.params if param.name not in shared]
    own.add_help_option = False
    with (
        cli.make_context(NAME, ["x"], resilient_parsing=True, terminal_width=WIDTH) as top,
        own.make_context(name, [], parent=top, resilient_parsing=True) as context,
    ):
        return own.get_help(context)


def _shared() -> str:
    with click.Context(cli, terminal_width=WIDTH) as context:
        formatter = context.make_formatter()
        for title, options in GROUPS.items():
            rows = [row for row in (option.get_help_record(context) for option in options) if row]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=27)
    return formatter.getvalue()
