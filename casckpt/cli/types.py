"""Kinds of values that options take."""

from __future__ import annotations

import json
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
        """What was given, as a timedelta."""
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


class Renaming(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """REGEX=NAME: what matches, and what it becomes; after the last "=" there is no more of the expression."""

    name = "regex=name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """The regular expression and its replacement."""
        if isinstance(value, tuple):
            return value
        pattern, equals, replacement = value.rpartition("=")
        if not pattern or not equals:
            self.fail(f"{value!r} is not REGEX=NAME", param, ctx)
        return pattern, replacement


SIZE, DURATION, SETTING, RENAMING = Size(), Duration(), Setting(), Renaming()
