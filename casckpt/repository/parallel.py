"""A function over many items by several threads, with a bounded number of items in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias, TypeVar

A = TypeVar("A")
B = TypeVar("B")
_WAITING = 4  # items for each thread: enough to keep it busy
_Task: TypeAlias = "tuple[Future[B], Callable[[A], B], A]"


def in_parallel(threads: int, function: Callable[[A], B], items: Iterable[A], *, name: str) -> Iterator[B]:
    """``function`` of every item, in order. The first error is raised, and what has not begun then is left out.

    ``name``: of the threads. They are daemons, so that a program which ends does not wait for what goes on behind it.
    """
    rest, count = iter(items), max(threads, 1)
    tasks: SimpleQueue[_Task[B, A] | None] = SimpleQueue()
    pending: deque[Future[B]] = deque()

    def submit(most: int) -> None:
        for item in islice(rest, most):
            pending.append(Future())
            tasks.put((pending[-1], function, item))

    workers = [Thread(target=_work, args=(tasks,), name=f"casckpt-{name}-{n}", daemon=True) for n in range(count)]
    for worker in workers:
        worker.start()
    try:
        submit(_WAITING * count)
        while pending:
            done = pending.popleft().result()
            submit(1)
            yield done
    finally:
        for future in pending:
            future.cancel()
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.join()


def _work(tasks: SimpleQueue[_Task[B, A] | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function, item = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(item))
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(error)
        del future, item, task  # or they would stay until the next one comes
