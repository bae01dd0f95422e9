"""docs/cli.md says what --help says. After a change, ``python -m tests.cli.test_docs`` writes it again.

Options that many commands share are on the page once.
"""

from __future__ import annotations

import re
from copy import copy
from pathlib import Path

import click

from casckpt.cli.main import NAME, cli
from casckpt.cli.rules import keep_options
from casckpt.cli.session import COMMON, ON_STORES, REQUIRE_SIGNATURE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
WIDTH = 88

GROUPS = {
    "All commands": COMMON,
    "All commands except demo": ON_STORES,
    "export, follow, serve, verify": [REQUIRE_SIGNATURE],
    "Retention rules of gc, stats and thin": click.command("rules")(keep_options(lambda: None)).params,
}
"""Options that many commands share."""


def help_of(name: str = "") -> str:
    """What ``casckpt NAME --help`` prints, without the options that many commands share."""
    with cli.make_context(NAME, ["x"], resilient_parsing=True, terminal_width=WIDTH) as top:
        command = cli.get_command(top, name) if name else None
        if command is None:
            return cli.get_help(top)
        with command.make_context(name, [], parent=top, resilient_parsing=True) as context:
            shared = {option.name for options in GROUPS.values() for option in options}
            own = copy(command)
            own.params = [param for param in command.params if param.name not in shared]
            own.add_help_option = False
            return own.get_help(context)


def shared_options() -> str:
    """The section of the options that many commands share."""
    with click.Context(cli) as context:
        formatter = context.make_formatter()
        formatter.width = WIDTH
        for title, options in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [row for row in (one.get_help_record(context) for one in options) if row], col_max=27
                )
    return f"## Shared options\n\n```text\n{formatter.getvalue().strip()}\n```\n"


def names() -> list[str]:
    """All commands, sorted."""
    with click.Context(cli) as context:
        return cli.list_commands(context)


def section(name: str) -> str:
    """The section of one command, "" for the program itself."""
    title = f"{NAME} {name}".strip()
    return f"## {title}\n\n```text\n{help_of(name)}\n```\n"


def by_hand() -> str:
    """The text before the generated sections."""
    return PAGE.read_text().partition(f"## {NAME}\n")[0]


def page() -> str:
    """The page as it should be."""
    return by_hand() + "\n".join([section(""), shared_options(), *map(section, names())])


def test_the_page_is_what_help_says() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.cli.test_docs"


def test_shared_options_are_those_of_the_commands_in_their_title() -> None:
    every = set(names())
    with click.Context(cli) as context:
        for title, options in GROUPS.items():
            named = set(re.findall(r"\w+", title)) & every
            expected = named if named and "except" not in title else every - named
            commands = {name: cli.get_command(context, name) for name in every}
            params = {name: {param.name for param in command.params} for name, command in commands.items() if command}
            for option in options:
                having = {name for name in every if option.name in params[name]}
                assert having == expected, f"{title}: {option.name}"


def test_every_command_is_in_the_table_of_fields() -> None:
    for name in names():
        assert f"| `{name}`" in by_hand(), f"docs/cli.md does not say what {name} --json gives"


def test_help_says_what_every_option_does() -> None:
    with click.Context(cli) as context:
        for name in names():
            command = cli.get_command(context, name)
            assert command is not None
            assert command.help
            silent = [one.name for one in command.params if isinstance(one, click.Option) and not one.help]
            assert silent == [], name
            assert not command.get_short_help_str(60).endswith("..."), f"{name}: its first sentence is long"


if __name__ == "__main__":
    PAGE.write_text(page())
