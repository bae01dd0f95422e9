"""Kinds of values that options take."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click

from casckpt.base.durations import seconds_of
from casckpt.base.sizes import parse_size
from casckpt.errors import InvalidInput


class Parsed(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """What ``parse`` makes of text, whose InvalidInput says what is wrong with that. ``name``: shown in capitals."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse it, unless that was done."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


def _setting(text: str) -> tuple[str, Any]:
    """The value is JSON where it can be read as such (true, 8, {"a": 1}), else text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput("what was given is not KEY=VALUE")  # it may be a secret
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _text_setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise InvalidInput(f"{text!r} is not NAME=VALUE")
    return name, value


def _renaming(text: str) -> tuple[str, str]:
    pattern, _, name = text.rpartition("=")  # the last one ends the expression
    if not pattern:
        raise InvalidInput(f"{text!r} is not REGEX=NAME")
    return pattern, name


SIZE = Parsed("size", parse_size)
DURATION = Parsed("duration", lambda text: timedelta(seconds=seconds_of(text)))
SETTING = Parsed("key=value", _setting)
TEXT_SETTING = Parsed("name=value", _text_setting)
RENAMING = Parsed("regex=name", _renaming)
