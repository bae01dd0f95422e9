"""The exit status of a program after a background save fails and no caller receives the error.

No function that Python calls at exit can set the status. However, the status is 120 (see `sys.exit`) if an error
occurs during clean-up, for example if a standard stream cannot be flushed. Therefore, this module makes the last flush
fail. Unlike with `os._exit`, all other exit functions still run.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # imported first, so that Python waits for its pools after `_ending` is set
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from casckpt.errors import Conflict

STATUS: Final = 120
"""The exit status, unless an uncaught error ends the program."""

log = logging.getLogger(__name__)
T = TypeVar("T")
_UNREPORTED: Final = "the last background save failed, and no caller checked its future: %s"
_ending: Final = threading.Event()

unreported: Final[dict[object, str]] = {}
"""Errors that no caller has received, by the name of the future.

References to the futures themselves would keep the saved state in memory.
"""
futures: Final = set["ReportedFuture[Any]"]()
"""All unfinished futures of this process."""

with suppress(AttributeError, RuntimeError):  # the function is private, and the interpreter may be exiting already
    threading._register_atexit(_ending.set)  # type: ignore[attr-defined] # see above


def note_if_late(error: BaseException) -> None:
    """Record the error of a save in a thread if the interpreter is exiting.

    At this point, no caller can query the future.
    """
    if _ending.is_set() and threading.current_thread() is not threading.main_thread():
        unreported[object()] = str(error)


class ReportedFuture(concurrent.futures.Future[T]):
    """A future whose error is reported when the program ends, unless somebody reads it. It cannot be cancelled.

    Whoever creates it finishes it, because other code waits for all `futures`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = object()
        self.awaited = False  # a caller is waiting, and will receive the error
        self.is_inherited = False  # the process that forked this one finishes it
        self.set_running_or_notify_cancel()
        futures.add(self)
        self.add_done_callback(futures.discard)

    @property
    def is_read(self) -> bool:
        """Whether somebody has read the error. Waits for it."""
        concurrent.futures.wait([self])
        return self.name not in unreported

    def take(self, call: Callable[[], T], caught: type[BaseException] = BaseException) -> None:
        """Make a call, and take its result, or its error if it is one of ``caught``."""
        try:
            self.set_result(call())
        except caught as error:
            self.set_exception(error)

    def follow(self, other: concurrent.futures.Future[Any], call: Callable[[], T]) -> None:
        """Make a call once ``other`` is done, in the same thread, and take the call's result or error."""
        other.add_done_callback(lambda _: self.take(call))

    def set_exception(self, exception: BaseException | None) -> None:
        """See `Future.set_exception`."""
        unreported[self.name] = str(exception)
        super().set_exception(exception)

    def result(self, timeout: float | None = None) -> T:
        """Wait, and return the result or raise the error."""
        self.awaited = True
        try:
            return super().result(timeout)
        finally:
            self._note_retrieved()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error. Return None if there is none."""
        self.awaited = True
        try:
            return super().exception(timeout)
        finally:
            self._note_retrieved()

    def _note_retrieved(self) -> None:
        if self.done():
            unreported.pop(self.name, None)
        self.awaited = False


def _end_in_child() -> None:
    """End the futures of the process that forked this one, because that process finishes and reports them."""
    for future in tuple(futures):
        future.__init__()  # type: ignore[misc] # without callbacks, and with a lock that no other thread holds
        future.is_inherited = True
        future.set_exception(Conflict("the process that forked this one runs this save: wait for the save there"))
    unreported.clear()


os.register_at_fork(after_in_child=_end_in_child)


@atexit.register
def _report() -> None:
    """Log the errors, because no later call can raise them."""
    for why in unreported.values():
        log.error(_UNREPORTED, why)
        if log.hasHandlers() and sys.stderr is not None:  # without handlers, logging writes to stderr itself
            sys.stderr.write(f"casckpt: {_UNREPORTED % why}\n")
    if unreported:
        _end_badly()


def _end_badly() -> None:
    """End the program with `STATUS`, unless an uncaught error ends it.

    A status that the program passed to `sys.exit` is lost. A clean-up function cannot see it, and casckpt does not
    replace `sys.exit`.
    """
    uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if uncaught is not None:
        return
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name)
        if stream is not None and not stream.closed:
            setattr(sys, name, _Unflushed(stream))
            return


class _Unflushed:
    """A standard stream whose last flush fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream. Raises OSError on the last flush. Python does not print this error."""
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("something failed; see above")
