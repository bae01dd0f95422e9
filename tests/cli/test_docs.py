"""docs/cli.md names every command with its purpose and its JSON. The site adds the rest from ``--help``."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from commands import GROUPS, command_of, names, sections

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("name", names())
def test_the_page_documents_the_purpose_and_json_of_each_command(name: str) -> None:
    purpose = command_of(name).get_short_help_str(90).rstrip(".")
    assert re.search(rf"^\| `{name}` \| (\[{purpose}\]\(.*\)|{purpose}) \|$", PAGE, re.MULTILINE)
    json = PAGE.partition("\n## JSON output\n")[2].partition("\n## ")[0]
    assert re.search(rf"^\| `{name}`[ (]", json, re.MULTILINE)


@pytest.mark.parametrize("name", names())
def test_help_describes_every_option(name: str) -> None:
    command = command_of(name)
    assert command.help
    assert [one.name for one in command.params if isinstance(one, click.Option) and not one.help] == []
    assert not command.get_short_help_str(60).endswith("..."), "its first sentence is long"


def test_the_site_documents_every_option_of_every_command() -> None:
    text = sections()
    own = dict(re.findall(r"^## casckpt ([\w-]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    shared = text.partition("\n## ")[0]
    assert sorted(own) == names()
    for name in names():
        assert f"Usage: casckpt {name} " in own[name]
        for option in command_of(name).params:
            if isinstance(option, click.Option):
                assert option.opts[-1] in own[name] + shared


def test_shared_options_are_documented_for_exactly_the_commands_that_have_them() -> None:
    every = set(names())
    for title, options in GROUPS.items():
        named = set(re.findall(r"\w+", title)) & every
        expected = named if named and "except" not in title else every - named
        for option in options:
            having = {name for name in every if option.name in {param.name for param in command_of(name).params}}
            assert having == expected, f"{title}: {option.name}"
