"""Text output: sizes, times, and tables. Control characters from a store are escaped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import click

from casckpt.base.units import format_size

SHORT_ID: Final = 12
_MANY: Final = 20
_GAP: Final = 2

say = click.echo
size = format_size


def printable(text: str, *, lines: bool = False) -> str:
    """Escape the control characters in ``text``. Keep line breaks only if ``lines`` is set."""

    def shown(character: str) -> str:
        if character.isprintable() or (lines and character == "\n"):
            return character
        return character.encode("unicode_escape").decode("ascii")

    return text if text.isprintable() else "".join(map(shown, text))


def bold(text: str) -> str:
    """Return ``text`` in bold if the terminal can show it and NO_COLOR is not set."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else click.style(text, bold=True)


def freed(now: int, later: int) -> str:
    """Format how many bytes gc frees now, and how many it frees once forgotten checkpoints are purged."""
    return f"{size(now)} now, {size(later)} later" if later else size(now)


def count(number: int, what: str) -> str:
    """Format a count: ``1 blob``, ``3 blobs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def moment(iso: str) -> str:
    """Format a time from the JSON output in UTC, to the minute."""
    return datetime.fromisoformat(iso).astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def name(one: dict[str, Any]) -> str:
    """Format RUN@STEP and the short id of a checkpoint from the JSON output."""
    return f"{printable(one['run'])}@{one['step']} ({one['id'][:SHORT_ID]})"


def shortened(items: Sequence[str], most: int = _MANY) -> list[str]:
    """Return the first ``most`` items, and a line with the number of remaining items."""
    if len(items) <= most:
        return list(items)
    return [*items[:most], f"... and {len(items) - most} more (--json lists all)"]


def say_all(lines: Iterable[str]) -> None:
    """Print the lines."""
    for line in lines:
        say(line)


def say_some(items: Sequence[str], most: int = _MANY) -> None:
    """Print the first ``most`` items, one per line, and the number of remaining items."""
    say_all(shortened(items, most))


def summed(keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys, but combine all keys with the same first part into one line."""
    for head, number in Counter(key.partition(".")[0] for key in keys).items():
        same = (key for key in keys if key.partition(".")[0] == head)
        yield next(same) if number == 1 else f"{head}.* ({number} keys)"


@dataclass(frozen=True)
class Column:
    """A table column. ``side``: its alignment."""

    title: str
    side: Literal["left", "right"] = "left"


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, one line per row.

    This does not use rich, because rich would take half a second for a thousand rows.
    """
    cells = [tuple(map(printable, row)) for row in rows]
    widths = [len(column.title) for column in columns]
    for row in cells:
        widths = [max(width, cell_width(cell)) for width, cell in zip(widths, row, strict=True)]
    say(bold(_line(columns, widths, [column.title for column in columns])))
    say_all(_line(columns, widths, row) for row in cells)


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Iterable[str]) -> str:
    shown = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        room = " " * (width - cell_width(cell))
        shown.append(room + cell if column.side == "right" else cell + room)
    return (" " * _GAP).join(shown).rstrip()


def cell_width(text: str) -> int:
    """Return the number of terminal columns that ``text`` occupies."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print name-value pairs, one per line."""
    given = list(rows)
    width = max((len(title) for title, _ in given), default=0)
    for title, value in given:
        say(f"{title:<{width}}  {printable(value)}".rstrip())


def states(checkpoint: Mapping[str, Any], *names: str) -> list[str]:
    """Return the states in ``names`` that a checkpoint from the JSON output has, and who forgot it."""
    by = {"forgotten": f"forgotten by {checkpoint['forgotten_by']}"}
    return [by.get(name, name) for name in names if checkpoint[name]]


def unusual(health: Mapping[str, Any] | None) -> list[str]:
    """Format the counts of NaN and infinite elements. The result is empty if there are none."""
    found = {} if health is None else {"NaN": health["nan"], "infinite": health["inf"]}
    return [f"{number} {what}" for what, number in found.items() if number]


def coded(stats: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the plain and stored sizes of the encoded cells as a name-value pair, if there are such cells."""
    plain, frames, deltas = (stats[f"bytes_{name}"] for name in ("coded", "frames", "deltas"))
    return [("smaller", f"{size(plain)} in {size(frames)}, including {size(deltas)} of deltas")] if plain else []
