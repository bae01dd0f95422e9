"""Prints results on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from benchmarks.results import ScenarioResult
from benchmarks.show import cells

_WIDTH = 200  # if the terminal has no width
_OUT = Console(width=None if Console().is_terminal else _WIDTH)
_ERR = Console(stderr=True)


@contextmanager
def progress(name: str) -> Iterator[Callable[[str], None]]:
    """Report progress on a terminal."""
    if not _ERR.is_terminal:
        yield lambda text: None
        return
    with _ERR.status(name) as status:
        yield lambda text: status.update(f"{name}: {text}")


def show(scenario: ScenarioResult) -> None:
    """Print the tables of one scenario."""
    given = ", ".join(f"{name} {value}" for name, value in scenario.parameters.items())
    _OUT.print(f"\n[bold]{scenario.name}: {scenario.title}[/bold]\n{given}, {scenario.seconds:.0f} s", highlight=False)
    columns = cells.columns(scenario)
    grid = Table("what", *(heading for heading, _ in columns))
    group = ""
    for row in scenario.rows:
        if row.group != group:
            grid.add_section()
            grid.add_row(f"[italic]{row.group}[/italic]")
            group = row.group
        figures = [text(row) for _, text in columns] if row.summary else [row.note]
        grid.add_row(row.name, *figures, style="bold" if row.who == "casckpt" else None)
    _OUT.print(grid)
    if scenario.checks:
        targets = Table("target", "wanted", "found", "")
        for check in scenario.checks:
            targets.add_row(*cells.target(check))
        _OUT.print(targets)
