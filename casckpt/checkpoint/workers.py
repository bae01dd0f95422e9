"""Running the tasks of a save or a load at the same time, where that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from casckpt.errors import CasckptError

T = TypeVar("T")
_WORTH_A_THREAD = 64 << 10


def useful_threads(threads: int, nbytes: int, pieces: int) -> int:
    """``threads``, or 1 where the pieces are so small that the interpreter is what all threads would wait for."""
    return threads if nbytes >= pieces * _WORTH_A_THREAD else 1


def run_all(call: Callable[[T], None], tasks: Iterable[T], threads: int) -> None:
    """Call all; the first error is raised once all have ended. One task, or one thread, is run by the caller itself."""
    todo = list(tasks)
    if threads == 1 or len(todo) <= 1:
        for task in todo:
            call(task)
        return
    with ThreadPoolExecutor(min(threads, len(todo)), thread_name_prefix="casckpt") as pool:
        futures = [pool.submit(call, task) for task in todo]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, CasckptError))  # ours says more
