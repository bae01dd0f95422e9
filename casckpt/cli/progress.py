"""How far something is that takes long: a bar on a terminal, and a line each half minute where there is none."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from casckpt.cli.text import say, size

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

EACH: Final = 30.0  # seconds between two lines
_NARROW: Final = 60  # columns of a terminal


class Bar:
    """How far something is: called with the units just done. ``total``: units in all, None if not known yet."""

    def __init__(self, total: int | None) -> None:
        self.total = total

    def __call__(self, done: int) -> None:
        """So many units more are done."""

    def expect(self, total: int) -> None:
        """So many units there are in all."""
        self.total = total


class Lines(Bar):
    """For logs: nothing at all for what is done within half a minute."""

    def __init__(self, what: str, total: int | None, *, of_bytes: bool) -> None:
        super().__init__(total)
        self._what, self._of_bytes = what, of_bytes
        self._done, self._began = 0, time.monotonic()
        self._next = self._began + EACH
        self._lock = threading.Lock()  # several threads tell what they have done

    def __call__(self, done: int) -> None:
        """So many units more are done."""
        with self._lock:
            self._done += done
            now = time.monotonic()
            if now >= self._next:
                self._next = now + EACH
                say(f"casckpt: {self._what}: {self._text(now)}", err=True)

    def _text(self, now: float) -> str:
        amount = size if self._of_bytes else str
        of_all = f" of {amount(self.total)} ({self._done / self.total:.0%})" if self.total else ""
        rate = f", {size(int(self._done / (now - self._began)))}/s" if self._of_bytes else ""
        return f"{amount(self._done)}{of_all}{rate}"


class _Shown(Bar):
    def __init__(self, total: int | None, bars: Progress, task: TaskID) -> None:
        super().__init__(total)
        self._bars, self._task = bars, task

    def __call__(self, done: int) -> None:
        self._bars.advance(self._task, done)

    def expect(self, total: int) -> None:
        super().expect(total)
        self._bars.update(self._task, total=total)


@contextmanager
def progress(what: str, total: int | None, *, of_bytes: bool = True) -> Iterator[Bar]:
    """Show how far it is, on stderr. ``total``: units in all, None if that is not known yet."""
    if not sys.stderr.isatty():
        yield Lines(what, total, of_bytes=of_bytes)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*_columns(of_bytes), console=Console(stderr=True), transient=True, expand=True) as bars:
        yield _Shown(total, bars, bars.add_task(what, total=total))


def _columns(of_bytes: bool) -> list[ProgressColumn]:
    """What fits: 40 columns have room for the name, a bar and the amount; wider ones for the rate and the time too."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=None)]
    columns.append(DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn())
    if shutil.get_terminal_size().columns >= _NARROW:
        columns += [TransferSpeedColumn()] * of_bytes + [TimeRemainingColumn()]
    return columns
