"""docs/cli.md says what --help says. After a change: ``python -m tests.cli.test_docs`` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

import click

from casckpt.cli.main import NAME, cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
WIDTH = 88


def help_of(name: str = "") -> str:
    """What ``casckpt NAME --help`` prints."""
    with cli.make_context(NAME, ["x"], resilient_parsing=True, terminal_width=WIDTH) as top:
        command = cli.get_command(top, name) if name else None
        if command is None:
            return cli.get_help(top)
        with command.make_context(name, [], parent=top, resilient_parsing=True) as context:
            return command.get_help(context)


def names() -> list[str]:
    """All commands, sorted."""
    with click.Context(cli) as context:
        return cli.list_commands(context)


def section(name: str) -> str:
    """The section of one command, "" for the program itself."""
    title = f"{NAME} {name}".strip()
    return f"## {title}\n\n```text\n{help_of(name)}\n```\n"


def by_hand() -> str:
    """The text before the first section, which nobody generates."""
    return re.split(r"^## ", PAGE.read_text(), maxsplit=1, flags=re.MULTILINE)[0]


def page() -> str:
    """The page as it should be."""
    return by_hand() + "\n".join(map(section, ["", *names()]))


def test_the_page_is_what_help_says() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.cli.test_docs"


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
