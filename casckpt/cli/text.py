"""Text output: sizes, times, and tables that fit the terminal. Control characters from a store are escaped."""

from __future__ import annotations

import os
import shutil
import sys
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
_LEAST: Final = 12  # the minimum columns of a truncated cell

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
    """A table column. ``side``: its alignment. ``fixed``: its cells are never truncated to fit the terminal.

    ``spare``: if truncation is not enough, columns are dropped in ascending order of this number. A column with 0 is
    never dropped.
    """

    title: str
    side: Literal["left", "right"] = "left"
    fixed: bool = False
    spare: int = 0


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, one line per row. On a terminal, truncate long lines with an ellipsis.

    This does not use rich, because rich would take half a second for a thousand rows.
    """
    cells = [tuple(map(printable, row)) for row in rows]
    room = terminal_width()
    widths = [len(column.title) for column in columns]
    for row in cells:
        widths = [max(width, cell_width(cell)) for width, cell in zip(widths, row, strict=True)]
    kept = _kept(columns, widths, room)
    columns, widths = [columns[i] for i in kept], [widths[i] for i in kept]
    widths = _cut_widths(columns, widths, room)
    say(bold(_cut(_line(columns, widths, [column.title for column in columns]), room)))
    for row in cells:
        say(_cut(_line(columns, widths, [_cut(row[i], width) for i, width in zip(kept, widths, strict=True)]), room))


def terminal_width() -> int:
    """Return the width of the terminal at stdout. Without a terminal, return a number larger than any line's width."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else sys.maxsize


def _kept(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """Return the indices of the columns to show: as many as fit after truncation."""
    kept = list(range(len(columns)))
    least = [width if c.fixed else min(width, _LEAST) for c, width in zip(columns, widths, strict=True)]
    for i in sorted((i for i in kept if columns[i].spare), key=lambda i: columns[i].spare):
        if sum(least[k] for k in kept) + _GAP * (len(kept) - 1) <= room:
            break
        kept.remove(i)
    return kept


def _cut_widths(columns: Sequence[Column], wanted: Sequence[int], room: int) -> list[int]:
    """Return the column widths. If a line is too long, the widest column that is not fixed is narrowed first."""
    widths = list(wanted)
    excess = sum(widths) + _GAP * (len(widths) - 1) - room
    while excess > 0:
        may = [not c.fixed and width > len(c.title) for c, width in zip(columns, widths, strict=True)]
        if not any(may):
            break
        widths[max(range(len(widths)), key=lambda i: widths[i] * may[i])] -= 1
        excess -= 1
    return widths


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Iterable[str]) -> str:
    shown = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        room = " " * (width - cell_width(cell))
        shown.append(room + cell if column.side == "right" else cell + room)
    return (" " * _GAP).join(shown).rstrip()


def _cut(text: str, width: int) -> str:
    """Truncate ``text`` with an ellipsis if it is too long."""
    if cell_width(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1) + "…"


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
