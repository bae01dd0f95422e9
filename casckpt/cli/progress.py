"""Bars for what takes long, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int | None, *, of_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """Show how far it is, on stderr if that is a terminal. What it yields is called with the units just done.

    ``total``: units in all, None if that is not known.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
