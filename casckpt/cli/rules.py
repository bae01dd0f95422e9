"""The options for retention rules, the same for all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from casckpt.cli.types import DURATION, Parsed
from casckpt.plan.retention import Best

AT_LEAST_ONE: Final = click.IntRange(min=1)


def _best(text: str) -> str:
    Best.parse(text)
    return text


_OPTIONS: Final = (
    click.option("--keep-last", type=click.IntRange(min=0), metavar="N", help="Keep the N newest of each run."),
    click.option("--keep-every", type=AT_LEAST_ONE, metavar="N", help="Keep steps that are a multiple of N."),
    click.option("--keep-within", type=DURATION, help="Keep what was saved within this time (12h, 7d)."),
    click.option(
        "--keep-daily", type=AT_LEAST_ONE, metavar="N", help="Keep the newest of each of the last N days that have one."
    ),
    click.option("--keep-weekly", type=AT_LEAST_ONE, metavar="N", help="The same for N weeks."),
    click.option("--keep-monthly", type=AT_LEAST_ONE, metavar="N", help="The same for N months."),
    click.option(
        "--keep-best",
        type=Parsed("best", _best),
        multiple=True,
        metavar="METRIC:[max:]N",
        help="Keep the N with the lowest value, or the highest (max). May be repeated.",
    ),
)


def keep_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the rules as options; the function gets them by the names of the fields of `Policy`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
