"""Runs tests in forks of the process that has collected them: ``--workers COUNT``.

Imports and collection take up to a minute of CPU time and 700 MB of memory, which the workers share. Each worker runs
consecutive tests. A worker that has none left takes over half of those that a different worker has not started.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import pytest

_FORK = multiprocessing.get_context("fork")
DIED = "its worker died before it reported this test"
threads: list[str] = []
"""The threads of the main process when it forked the workers, which do not have them."""


class _Queues:
    """The tests that the workers have not started: consecutive positions for each worker, in shared memory."""

    def __init__(self, tests: int, workers: int) -> None:
        self._starts: Any = _FORK.Array("l", [tests * worker // workers for worker in range(workers)])
        self._ends: Any = _FORK.Array("l", [tests * (worker + 1) // workers for worker in range(workers)])

    def take(self, worker: int) -> Iterator[int]:
        """Yield the positions of a worker's tests."""
        while (position := self._next(worker)) is not None:
            yield position

    def _next(self, worker: int) -> int | None:
        starts, ends = self._starts, self._ends
        with starts.get_lock():
            if starts[worker] == ends[worker]:
                longest = max(range(len(starts)), key=lambda other: ends[other] - starts[other])
                middle = (starts[longest] + ends[longest]) // 2
                starts[worker], ends[worker], ends[longest] = middle, ends[longest], middle
            if starts[worker] == ends[worker]:
                return None
            starts[worker] += 1
            return int(starts[worker]) - 1

    def clear(self) -> None:
        """Let each worker end after the tests that it has taken."""
        with self._starts.get_lock():
            self._starts[:] = self._ends[:]


class _Reporter:
    """A plugin that sends a worker's reports to the main process."""

    def __init__(self, config: pytest.Config, pipe: Any) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._pipe.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run the tests in so many forks (0: in this process)")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, or return None to let pytest run them in this process."""
    count = session.config.getoption("--workers")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # one folder for all workers
    threads[:] = [thread.name for thread in threading.enumerate()]
    queues, workers = _Queues(len(session.items), count), dict[Any, Any]()
    for worker in range(count):
        pipe, end = _FORK.Pipe(duplex=False)
        workers[pipe] = _FORK.Process(target=_work, args=(session, queues.take(worker), end))
        workers[pipe].start()
        end.close()
    running = set(workers)
    try:
        _receive(session, running)
    finally:
        queues.clear()
        for pipe in running:
            while _next_report(pipe) is not None:
                pass
        for worker in workers.values():
            worker.join()
    return True


def _work(session: pytest.Session, positions: Iterator[int], pipe: Any) -> None:
    """Run a worker's tests."""
    plugins = session.config.pluginmanager
    terminal: Any = plugins.unregister(name="terminalreporter")
    plugins.register(SimpleNamespace(_tw=terminal._tw), "terminalreporter")  # pytest-timeout writes stacks there
    plugins.register(_Reporter(session.config, pipe))
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files belong to the main process
    capture.start_global_capturing()
    try:
        position = next(positions, None)
        while position is not None:
            following = next(positions, None)
            after = None if following is None else session.items[following]
            session.config.hook.pytest_runtest_protocol(item=session.items[position], nextitem=after)
            position = following
        pipe.send(None)
    finally:
        capture.stop_global_capturing()  # shows what the last test or an error has printed


def _next_report(pipe: Any) -> Any:
    """Return the next report of a worker, or None if the worker has finished or died."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _receive(session: pytest.Session, pipes: set[Any]) -> None:
    """Receive the reports of all tests. A test without one has failed, because its worker died."""
    hook, missing = session.config.hook, {item.nodeid: item for item in session.items}
    terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
    terminal.showfspath = False  # tests of several files alternate
    while pipes:
        ready: list[Any] = wait(pipes)
        for pipe in ready:
            data = _next_report(pipe)
            if data is None:
                pipes.remove(pipe)
                continue
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                missing.pop(report.nodeid, None)
                hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    for item in missing.values():
        hook.pytest_runtest_logreport(report=pytest.TestReport(item.nodeid, item.location, {}, "failed", DIED, "call"))
