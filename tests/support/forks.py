"""A forked child of the test process, like those of data loaders: with the parent's memory, without its threads."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS = 60  # a child that hangs is killed, and fails the test


@contextmanager
def forked(call: Callable[[], object]) -> Iterator[None]:
    """While the body runs a child is there; afterwards it makes ``call``, which must not raise, nor hang."""
    hold, let_go = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: what is tested
        child = os.fork()
    if not child:
        os.close(let_go)
        _live(hold, call)
    os.close(hold)
    try:
        yield
    finally:
        os.close(let_go)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}; its traceback is on stderr"


def _live(hold: int, call: Callable[[], object]) -> None:
    """The child's life; it never returns into what its parent does."""
    try:
        signal.alarm(_SECONDS)
        os.read(hold, 1)
        call()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the parent sees the status
        traceback.print_exc()
    finally:
        os._exit(1)
