"""What a person reads: tables that fit into 80 columns, sizes, times, and no control characters out of a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import click

if TYPE_CHECKING:
    from rich.console import Console

SHORT_ID: Final = 12
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_MANY: Final = 20

say = partial(click.echo)


def printable(text: str, *, lines: bool = False) -> str:
    """``text`` with whatever a terminal might obey shown as an escape; line ends only if they are wanted."""

    def shown(character: str) -> str:
        if character.isprintable() or (lines and character == "\n"):
            return character
        return character.encode("unicode_escape").decode("ascii")

    return text if text.isprintable() else "".join(map(shown, text))


def size(nbytes: int) -> str:
    """Bytes for people: 512 B, 1.5 KiB, 32.0 MiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    number, unit = nbytes / 1024, 0
    while abs(number) >= 999.95 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_UNITS[unit]}"


def count(number: int, what: str) -> str:
    """``1 blob``, ``3 blobs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def moment(iso: str) -> str:
    """A time of the JSON output to the minute, in UTC."""
    return datetime.fromisoformat(iso).astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def name(one: dict[str, Any]) -> str:
    """RUN@STEP and the short id of a checkpoint in the JSON output."""
    return f"{printable(one['run'])}@{one['step']} ({one['id'][:SHORT_ID]})"


def shortened(items: Sequence[str], most: int = _MANY) -> list[str]:
    """The first ``most`` items, and how many more there are."""
    if len(items) <= most:
        return list(items)
    return [*items[:most], f"... and {len(items) - most} more (--json lists all)"]


@dataclass(frozen=True)
class Column:
    """``side``: numbers stand right. A column that is not ``fixed`` folds where the table is too wide."""

    title: str
    side: Literal["left", "right"] = "left"
    fixed: bool = False


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. No line is longer than the terminal is wide, or 80 columns where there is none."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        least = None if column.fixed else len(column.title)  # or a long text beside it would take all the room
        made.add_column(column.title, justify=column.side, no_wrap=column.fixed, overflow="fold", min_width=least)
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    out = console()
    with out.capture() as capture:
        out.print(made)
    for line in capture.get().splitlines():
        say(line.rstrip())


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    given = list(rows)
    width = max((len(title) for title, _ in given), default=0)
    for title, value in given:
        say(f"{title:<{width}}  {printable(value)}".rstrip())


def console() -> Console:
    """Where tables go: stdout, as it is now."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
