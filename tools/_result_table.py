"""Tables of docs/reliability.md that test runs fill row by row: tools/test-matrix, tools/test-filesystems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"


class Counts(NamedTuple):
    """How many tests had each result. ``failed`` is 1 if pytest itself failed."""

    passed: int
    skipped: int
    failed: int


def counts_of(printed: str, status: int) -> Counts:
    """Return the counts that pytest printed. ``status``: its exit status."""
    found = {what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped|failed|error)", printed)}
    failed = found.get("failed", 0) + found.get("error", 0) or int(status not in (0, 1))
    return Counts(found.get("passed", 0), found.get("skipped", 0), failed)


@dataclass(frozen=True)
class ResultTable:
    """The table between two comments that contain ``name``. The first ``keys`` columns identify a row."""

    name: str
    columns: Sequence[str]
    keys: int

    def with_row(self, page: str, row: Sequence[str]) -> str:
        """Return the page with this row in place of the earlier one with the same keys. Rows are sorted."""
        begin, end = f"<!-- {self.name} -->\n", f"<!-- end of {self.name} -->"
        before, _, rest = page.partition(begin)
        old, _, after = rest.partition(end)
        rows = {tuple(cells[: self.keys]): cells for cells in map(_cells, [*old.splitlines()[2:], _line(row)])}
        sorted_rows = [rows[key] for key in sorted(rows, key=_order)]
        lines = [_line(self.columns), "|" + "---|" * len(self.columns), *map(_line, sorted_rows)]
        table = "\n".join(lines)
        return f"{before}{begin}{table}\n{end}{after}"

    def write(self, *row: str) -> None:
        """Write a row to the page."""
        PAGE.write_text(self.with_row(PAGE.read_text(), row))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(line: str) -> list[str]:
    return line.removeprefix("| ").removesuffix(" |").split(" | ")


def _order(key: Sequence[str]) -> list[list[tuple[str, int]]]:
    """Sort numbers within words by their value, so that 2.9 precedes 2.13."""
    return [[(word, int(part or 0)) for word, part in re.findall(r"(\D*)(\d*)", cell)] for cell in key]
