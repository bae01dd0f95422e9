"""Runs work in other threads.

`in_parallel` yields results in order, `run_all` also uses the calling thread, and `within` limits the time of a call.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Generic, TypeAlias, TypeVar

from casckpt.errors import CasckptError, InvalidInput

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
_WAITING = 4  # queued items per thread, enough to keep it busy
_WORTH_A_THREAD = 64 << 10
_Task: TypeAlias = "tuple[Future[B], Callable[[A], B], A]"


def useful_threads(threads: int, nbytes: int, pieces: int) -> int:
    """Return ``threads``, or 1 if pieces are so small that threads would mostly wait for the interpreter."""
    return threads if nbytes >= pieces * _WORTH_A_THREAD else 1


def usable_cores(ranks: int = 1) -> int:
    """Return the number of cores available to each of ``ranks`` processes on this host, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def usable_threads(threads: int | None) -> int:
    """Return the number of threads to use. The default is the number of cores, but at least 2 and at most 8.

    Raises InvalidInput.
    """
    if threads is None:
        return max(2, min(8, usable_cores()))
    if type(threads) is not int or threads < 1:
        raise InvalidInput(f"threads={threads!r} is not valid; pass a positive number")
    return threads


def in_parallel(
    threads: int, function: Callable[[A], B], items: Iterable[A], *, name: str = "read", waiting: int = _WAITING
) -> Generator[B, None, None]:
    """Call ``function`` with every item, and yield the results in order. With one thread, the caller does the work.

    Raises the first error and skips the remaining items. ``name`` is part of the thread names. For each thread, there
    are at most ``waiting`` items whose results the caller has not yet received. A thread starts only
    when there is an item for it. The threads are daemons, so a program can exit without waiting for them.
    """
    if threads <= 1:
        yield from map(function, items)
        return
    rest = iter(items)
    tasks: SimpleQueue[_Task[B, A] | None] = SimpleQueue()
    pending: deque[Future[B]] = deque()
    workers: list[Thread] = []

    def submit(most: int) -> None:
        for item in islice(rest, most):
            pending.append(Future())
            tasks.put((pending[-1], function, item))
            if len(workers) < threads:
                worker = Thread(target=_work, args=(tasks,), name=f"casckpt-{name}-{len(workers)}", daemon=True)
                worker.start()
                workers.append(worker)

    try:
        submit(waiting * threads)
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
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        del future, item, task  # otherwise, they stay alive until the next task


class Late(RuntimeError):
    """A call in another thread did not end in time."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call ``call`` in another thread, and return its result. Raises `Late` after ``seconds``.

    A call to a store of torch, to gloo or to a client of a cloud may wait forever for a stopped process. It cannot be
    stopped, so it continues, and its result is ignored.
    """
    values, errors = list[T](), list[BaseException]()

    def run() -> None:
        try:
            values.append(call())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error.with_traceback(None))  # its frames would keep a gloo group alive

    thread = Thread(target=run, name="casckpt-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors.pop()  # not from a variable, which would form a cycle with the traceback
    if not values:
        raise Late(f"timed out after {seconds:.0f} s")
    return values[0]


def run_all(call: Callable[[T], None], tasks: Iterable[T], threads: int) -> None:
    """Call ``call`` with every task, in helper threads and in the calling thread.

    Once all have finished, raise the first error. Interrupts take precedence, and then casckpt's own errors. If no
    thread can be started, for example in a save that runs while the interpreter exits, the caller runs all tasks.
    """
    todo = list(tasks)
    if threads == 1 or len(todo) <= 1:
        for task in todo:
            call(task)
        return
    team = _Team(call, todo)
    try:
        team.start(min(threads, len(todo)) - 1)
        team.work()
    finally:
        team.join()
    if team.errors:
        raise min(team.errors, key=_rank)


def _rank(error: BaseException) -> int:
    """Order errors: interrupts first, then casckpt's errors, then all others."""
    return 0 if not isinstance(error, Exception) else 1 if isinstance(error, CasckptError) else 2


class _Team(Generic[T]):
    """A queue of tasks and its threads. The caller of `work` also runs tasks. ``errors``: the errors of all tasks."""

    def __init__(self, call: Callable[[T], None], tasks: Iterable[T]) -> None:
        self.errors: list[BaseException] = []
        self._call = call
        self._tasks = deque(tasks)
        self._helpers: list[Thread] = []
        self._changed = Condition()
        self._helping = 0
        self._over = False

    def start(self, helpers: int) -> None:
        """Start ``helpers`` threads, or as many as can be started."""
        for _ in range(helpers):
            helper = Thread(target=self._help, name="casckpt")
            try:
                helper.start()
            except RuntimeError:  # the interpreter cannot start a thread
                return
            self._helpers.append(helper)

    def _help(self) -> None:
        with self._changed:
            if self._over:
                return
            self._helping += 1
        try:
            self.work()
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify_all()

    def work(self) -> None:
        """Run tasks until the queue is empty."""
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            self._run(task)

    def _run(self, task: T) -> None:
        try:
            self._call(task)
        except BaseException as error:  # noqa: BLE001 - `run_all` raises it
            self.errors.append(error)
            if not isinstance(error, Exception):  # an interrupt
                self._tasks.clear()

    def join(self) -> None:
        """Wait for the helpers, which do not start any more tasks.

        Raises an interrupt only after the helpers have finished. Otherwise, a running helper could write into tensors
        that the caller refills. (In Python 3.11, an interrupted `Thread.join` reports a running thread as finished.)
        """
        while True:
            try:
                self._tasks.clear()
                with self._changed:
                    self._over = True
                    self._changed.wait_for(lambda: not self._helping)
                for helper in self._helpers:
                    helper.join()
            except BaseException as error:  # noqa: BLE001 - `run_all` raises it
                self.errors.append(error)
            else:
                return
