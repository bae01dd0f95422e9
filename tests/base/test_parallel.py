"""Work on several threads: each item or task is run once, results keep their order, and errors are as documented."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from casckpt.base import parallel
from casckpt.base.parallel import in_parallel, run_all, usable_cores
from casckpt.errors import StorageError

T = TypeVar("T")


@pytest.mark.parametrize("threads", [0, 1, 3, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 200])
def test_results_of_parallel_work_are_returned_in_order(threads: int, count: int) -> None:
    assert list(in_parallel(threads, str, range(count))) == [str(n) for n in range(count)]


def test_each_thread_processes_one_item_and_only_a_few_items_wait() -> None:
    meeting = threading.Barrier(3, timeout=60)
    taken: list[int] = []

    def items() -> Iterator[int]:
        for n in range(300):
            taken.append(n)
            yield n

    found = in_parallel(3, lambda _: meeting.wait(), items())
    next(found)
    assert len(taken) < 30
    assert len(list(found)) == 299


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_is_raised_and_no_further_task_starts(threads: int) -> None:
    done: list[int] = []

    def call(item: int) -> None:
        done.append(item)
        if item == 3:
            raise StorageError("what to do")

    before = threading.active_count()
    with pytest.raises(StorageError):
        list(in_parallel(threads, call, range(1000)))
    assert len(done) < 1000
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 200])
def test_every_parallel_task_runs_once(threads: int, count: int) -> None:
    done: list[int] = []
    run_all(done.append, range(count), threads)
    assert sorted(done) == list(range(count))


def test_the_requested_number_of_threads_runs_concurrently() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def meet(_: int) -> None:
        meeting.wait()

    run_all(meet, range(3), 3)


@pytest.mark.parametrize("threads", [2, 3])
def test_tasks_run_in_the_calling_thread_if_no_other_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """From Python 3.12 on, no thread can start while the interpreter shuts down."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    run_all(done.append, range(9), threads)
    assert done == list(range(9))


def test_the_most_specific_error_is_raised_after_all_tasks_have_run() -> None:
    done = []

    def call(task: int) -> None:
        done.append(task)
        if task == 1:
            raise ValueError("text of a library")
        if task == 5:
            raise StorageError("what to do")

    with pytest.raises(StorageError):
        run_all(call, range(20), 4)
    assert sorted(done) == list(range(20))


def test_an_interrupt_is_raised_and_no_further_task_starts() -> None:
    done: list[Any] = []

    def call(task: int) -> None:
        done.append(task)
        if task == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(call, range(10_000), 2)
    assert len(done) < 10_000


def test_an_interrupt_does_not_leave_a_helper_thread_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread would write into tensors that the caller may have filled after the interrupted load."""
    interrupted, helping, ended = threading.Event(), threading.Event(), []
    main, times = threading.current_thread(), iter(range(3))

    class Interrupted(threading.Condition):
        def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
            if next(times, None) is not None:
                raise KeyboardInterrupt
            interrupted.set()
            return super().wait_for(predicate, timeout)

    def call(_: int) -> None:
        if threading.current_thread() is main:
            assert helping.wait(60)
            return
        helping.set()
        assert interrupted.wait(60)
        ended.append(True)

    monkeypatch.setattr(parallel, "Condition", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(call, range(2), 2)
    assert ended == [True]
    assert next(times, None) is None


def test_ranks_on_one_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [usable_cores(ranks) for ranks in (1, 3, 4, 16, 100)] == [16, 5, 4, 1, 1]
