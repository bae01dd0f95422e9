"""Bars for what takes long, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """How far something is: called with the units just done. This one shows nothing."""

    def __call__(self, done: int) -> None:
        """So many units more are done."""

    def expect(self, total: int) -> None:
        """So many units there are in all."""


class _Shown(Bar):
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def __call__(self, done: int) -> None:
        self._bars.advance(self._task, done)

    def expect(self, total: int) -> None:
        self._bars.update(self._task, total=total)


@contextmanager
def progress(what: str, total: int | None, *, of_bytes: bool = True) -> Iterator[Bar]:
    """Show how far it is, on stderr if that is a terminal. ``total``: units in all, None if that is not known yet."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Shown(bars, bars.add_task(what, total=total))
