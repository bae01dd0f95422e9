"""Progress of long commands: a bar on a terminal, and a line every half minute elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Final

from casckpt.cli.text import say, size

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

EACH: Final = 30.0  # seconds between lines
_NARROW: Final = 60  # terminal columns


class Lines:
    """Prints progress for logs, at most one line every half minute."""

    def __init__(self, what: str, *, of_bytes: bool) -> None:
        self._what, self._of_bytes = what, of_bytes
        self._began = time.monotonic()
        self._next = self._began + EACH

    def __call__(self, done: int, total: int | None) -> None:
        """Print a line if half a minute has passed."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EACH
            say(f"casckpt: {self._what}: {self._text(done, total, now)}", err=True)

    def _text(self, done: int, total: int | None, now: float) -> str:
        amount = size if self._of_bytes else str
        of_all = f" of {amount(total)} ({done / total:.0%})" if total else ""
        rate = f", {size(int(done / (now - self._began)))}/s" if self._of_bytes else ""
        return f"{amount(done)}{of_all}{rate}"


class progress_bar(AbstractContextManager["progress_bar"]):  # noqa: N801 - programs call it like a function
    """Displays progress on stderr: ``store.save(..., progress=casckpt.progress_bar("saving"))``.

    On a terminal, it is a bar that disappears when the work or the ``with`` block ends. Elsewhere, it prints a line
    every half minute. ``what`` names the work. Pass ``of_bytes=False`` to count objects instead of bytes. Create a new
    progress bar for each call.
    """

    def __init__(self, what: str = "working", *, of_bytes: bool = True) -> None:
        self._what, self._of_bytes = what, of_bytes
        self._bars: Progress | None = None
        self._lines = None if sys.stderr is not None and sys.stderr.isatty() else Lines(what, of_bytes=of_bytes)

    def __call__(self, done: int, total: int | None) -> None:
        """Show the amount of work that is finished, and the total."""
        if self._lines is not None:
            self._lines(done, total)
            return
        if self._bars is None:
            self._bars = _bars(self._of_bytes)
            self._task = self._bars.add_task(self._what, total=total)
            self._bars.start()
        self._bars.update(self._task, completed=done, total=total)
        if total is not None and done >= total:
            self.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _bars(of_bytes: bool) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*_columns(of_bytes), console=Console(stderr=True), transient=True, expand=True)


def _columns(of_bytes: bool) -> list[ProgressColumn]:
    """Return the columns that fit: name, bar and amount, and on wide terminals also rate and time."""
    from rich import progress as rich

    columns: list[ProgressColumn] = [
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(bar_width=None),
    ]
    columns.append(rich.DownloadColumn(binary_units=True) if of_bytes else rich.MofNCompleteColumn())
    if shutil.get_terminal_size().columns >= _NARROW:
        columns += [rich.TransferSpeedColumn()] * of_bytes + [rich.TimeRemainingColumn()]
    return columns
