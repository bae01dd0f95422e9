"""A forked child of the test process, like a data loader worker.

It has its parent's memory but none of the parent's threads.
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS = 60  # before a hanging child is killed and the test fails


@contextmanager
def forked(call: Callable[[], object]) -> Iterator[None]:
    """Run the with block alongside a forked child, once the child has started.

    The child makes ``call``, which must neither raise an error nor hang.
    """
    hold, let_go = os.pipe()
    started, starting = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
        child = os.fork()
    if not child:
        os.close(let_go)
        _live(hold, starting, call)
    os.close(hold)
    os.close(starting)
    try:
        os.read(started, 1)
        os.close(started)
        yield
    finally:
        os.close(let_go)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}; its traceback is on stderr"


def _live(hold: int, starting: int, call: Callable[[], object]) -> None:
    """Run the child. It never returns into the parent's code."""
    try:
        signal.alarm(_SECONDS)
        os.write(starting, b".")
        os.read(hold, 1)
        call()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the parent sees the status
        traceback.print_exc()
    finally:
        os._exit(1)
