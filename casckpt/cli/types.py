"""Types for option values, and the keep-rule options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import click

from casckpt.base.units import parse_size, seconds_of
from casckpt.errors import InvalidInput
from casckpt.plan.retention import Best


class Parsed(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """A type whose values ``parse`` creates from strings. ``name`` appears in capitals in the help."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the value unless it is already parsed. Convert an InvalidInput to a usage error."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


def _setting(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE. The value is JSON if it parses as JSON (true, 8, {"a": 1}), and otherwise a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput("the value does not have the form KEY=VALUE")  # not quoted, because it may be a secret
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _text_setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise InvalidInput(f"{text!r} does not have the form NAME=VALUE")
    return name, value


def _renaming(text: str) -> tuple[str, str]:
    pattern, _, name = text.rpartition("=")  # the expression ends at the last "="
    if not pattern:
        raise InvalidInput(f"{text!r} does not have the form REGEX=NAME")
    return pattern, name


def _names_in(path: str) -> list[str]:
    with suppress(OSError, ValueError):
        names = json.loads(Path(path).read_bytes())
        if isinstance(names, list) and all(isinstance(one, str) for one in names):
            return names
    raise InvalidInput(f"{path} is not a file with a JSON list of names")


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise InvalidInput(f"{text!r} is not a part: pass K/N, with K from 1 to N, such as 1/7")
    return int(number) - 1, int(parts)


ENV_STORE: Final = "CASCKPT_STORE"
STORE = click.Path(readable=False)  # or a URL; shells complete a path
SIZE = Parsed("size", parse_size)
DURATION = Parsed("duration", lambda text: timedelta(seconds=seconds_of(text)))
PART = Parsed("k/n", _part)
SETTING = Parsed("key=value", _setting)
TEXT_SETTING = Parsed("name=value", _text_setting)
NAMES_FILE = Parsed("file", _names_in)
RENAMING = Parsed("regex=name", _renaming)


AT_LEAST_ONE: Final = click.IntRange(min=1)


def _best(text: str) -> str:
    Best.parse(text)
    return text


_OPTIONS: Final = (
    click.option(
        "--keep-last", type=click.IntRange(min=0), metavar="N", help="Keep the N newest checkpoints of each run."
    ),
    click.option(
        "--keep-every", type=AT_LEAST_ONE, metavar="N", help="Keep checkpoints whose step is a multiple of N."
    ),
    click.option("--keep-within", type=DURATION, help="Keep checkpoints that were saved within this time (12h, 7d)."),
    click.option(
        "--keep-daily",
        type=AT_LEAST_ONE,
        metavar="N",
        help="Keep the newest checkpoint of each of the last N days on which any was saved.",
    ),
    click.option("--keep-weekly", type=AT_LEAST_ONE, metavar="N", help="The same for weeks."),
    click.option("--keep-monthly", type=AT_LEAST_ONE, metavar="N", help="The same for months."),
    click.option(
        "--keep-best",
        type=Parsed("best", _best),
        multiple=True,
        metavar="METRIC:[max:]N",
        help="Keep the N checkpoints with the lowest (or with max, the highest) value. May be repeated.",
    ),
)


def keep_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the keep rules to a command as options. The function receives them under the field names of `Policy`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
