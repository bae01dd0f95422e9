"""The status with which a program ends, where something failed of which only its end can tell.

Nothing that runs when Python ends can set that status. But it is 120, as `sys.exit` has it, where an error occurs while
Python cleans up, such as a standard stream that cannot be flushed. So the last flush is made to fail. All others do at
the end what they always do; `os._exit` would cut them off, and what is in their buffers.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, Final, NoReturn

STATUS: Final = 120
"""Of a program that would have ended well."""


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


_given: Final[list[Any]] = []  # to sys.exit, by the main thread


@functools.cache
def watch_exits() -> None:
    """From now on, know what the main thread gave `sys.exit` last. Python does not tell those that clean up.

    wandb does it in the same way. Who raises SystemExit by other means ends with `STATUS` too, if something failed.
    """
    real = sys.exit

    @functools.wraps(real)
    def exit(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _given[:] = [status]
        real(status)

    sys.exit = exit


def end_badly() -> None:
    """Let the program, which is ending, do so with `STATUS`, unless it ends in an error anyway."""
    uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if uncaught is not None or any(_given):
        return
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name)
        if stream is not None and not stream.closed:
            setattr(sys, name, _Unflushed(stream))
            return
