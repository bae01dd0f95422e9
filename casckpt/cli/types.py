"""Kinds of values that options take."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click

from casckpt.errors import InvalidInput
from casckpt.plan.durations import seconds_of
from casckpt.plan.sizes import parse_size


class Size(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """Bytes: 4096, 1MiB, 5GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of what was given."""
        try:
            return value if isinstance(value, int) else parse_size(value)
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """A time: 90s, 15m, 12h, 7d, 2w, or 0."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Make a timedelta of what was given."""
        try:
            return timedelta(seconds=seconds_of(value))
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Setting(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """KEY=VALUE. The value is JSON where it can be read as such (true, 8, {"a": 1}), else text."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Key and value."""
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not key or not equals:
            self.fail("what was given is not KEY=VALUE", param, ctx)  # it may be a secret
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


class Pair(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """Two texts, neither of them empty but perhaps the second. ``split``: at which "="."""

    def __init__(self, form: str, split: Callable[[str, str], tuple[str, str, str]], *, may_be_empty: bool) -> None:
        self.name, self._form, self._split, self._may_be_empty = form.lower(), form, split, may_be_empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Split it."""
        if isinstance(value, tuple):
            return value
        first, equals, second = self._split(value, "=")
        if not first or not equals or not (second or self._may_be_empty):
            self.fail(f"{value!r} is not {self._form}", param, ctx)
        return first, second


SIZE, DURATION, SETTING = Size(), Duration(), Setting()
TEXT_SETTING = Pair("NAME=VALUE", str.partition, may_be_empty=False)
RENAMING = Pair("REGEX=NAME", str.rpartition, may_be_empty=True)  # the last "=" ends the expression
