"""The exit status of a program whose save in the background failed unnoticed.

Nothing that runs when Python ends can set that status. But it is 120, as `sys.exit` has it, where an error occurs while
Python cleans up, such as a standard stream that cannot be flushed. So the last flush is made to fail. All others do at
the end what they always do; `os._exit` would cut them off, and what is in their buffers.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its pools are waited for after `_ending` is set, for they came before
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Any, Final

STATUS: Final = 120
"""Of a program that no uncaught error ends."""

log = logging.getLogger(__name__)
_UNHEARD: Final = "the last save in the background failed, and nobody asked its future: %s"
_ending: Final = threading.Event()

unheard: Final[dict[object, str]] = {}
"""What failed, by the names of the futures that nobody asked. No futures: their errors hold the state that was saved,
and the store of one may be gone before the program ends."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=unheard.clear)  # it is for the parent to tell
with suppress(AttributeError, RuntimeError):  # nobody promised that there is this one; or the program is ending already
    threading._register_atexit(_ending.set)  # type: ignore[attr-defined] # see above


def note_if_late(error: BaseException) -> None:
    """A thread that saves has failed. If the program is at its end, whose future it is will not ask any more."""
    if _ending.is_set() and threading.current_thread() is not threading.main_thread():
        unheard[object()] = str(error)


@atexit.register
def _tell() -> None:
    """No next call will raise what failed last."""
    for why in unheard.values():
        log.error(_UNHEARD, why)
        if log.hasHandlers() and sys.stderr is not None:  # they may lead anywhere; without any it goes there anyway
            sys.stderr.write(f"casckpt: {_UNHEARD % why}\n")
    if unheard:
        _end_badly()


def _end_badly() -> None:
    """End the program with `STATUS`, unless an uncaught error ends it.

    A status that the program passed to `sys.exit` is lost: a clean-up function cannot see it, and casckpt does not
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
        """Flush it. Raises OSError when Python does so for the last time, which it does not show."""
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("something failed; see above")
