"""What runs in every process of another project's tests.

tools/outside lets Python import it there under two names: as ``sitecustomize``, which Python imports when it starts,
and as ``casckpt_outside``, a plugin of pytest that records how each test ends.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

COMMIT = "casckpt.history.transactions.Transaction.commit"


def start() -> None:
    """Install the adapter if this run uses casckpt, and count saves. Exit if this fails, since nobody would notice."""
    try:
        adapter = load(Path(os.environ["CASCKPT_OUTSIDE_ADAPTER"]))
        if "CASCKPT_OUTSIDE_STORES" in os.environ:
            adapter.install(store)
            count(COMMIT, "stored")
        for save in adapter.SAVES:
            count(save, "saved")
    except BaseException:  # noqa: BLE001  (Python itself would only print it, and go on)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)


def load(path: Path) -> ModuleType:
    """Import an adapter by its path, once in a process: pickles name the classes of the imported module."""
    name = f"casckpt_outside_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def store() -> str:
    """Return the path of the current test's store. All processes of a test have the same."""
    name = hashlib.sha256(_current_test().encode()).hexdigest()[:16]
    return str(Path(os.environ["CASCKPT_OUTSIDE_STORES"]) / name)


def count(name: str, what: str) -> None:
    """Record each call of a function or method."""
    place, _, attribute = name.rpartition(".")
    owner = _found(place)
    original: Callable[..., Any] = getattr(owner, attribute)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        record(_current_test(), what)
        return original(*args, **kwargs)

    setattr(owner, attribute, counted)


def record(test: str, what: str, error: str = "") -> None:
    """Append a line to the record, in one call, because several processes write there."""
    line = json.dumps({"test": test, "what": what, "error": error})
    fd = os.open(os.environ["CASCKPT_OUTSIDE_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


class Forked(context.ForkServerProcess):
    """A process with the environment of the process that starts it, as a spawned one has."""

    def start(self) -> None:
        """Start the process."""
        self.environment = dict(os.environ)
        super().start()

    def _bootstrap(self, *args: Any, **kwargs: Any) -> Any:
        os.environ.update(self.environment)
        return super()._bootstrap(*args, **kwargs)  # type: ignore[misc]


def pytest_configure() -> None:
    """Let ranks of tests begin as forks of a process that has imported ``PRELOADED``, which takes seconds."""
    adapter = load(Path(os.environ["CASCKPT_OUTSIDE_ADAPTER"]))
    if hasattr(adapter, "PRELOADED"):
        multiprocessing.set_forkserver_preload([*adapter.PRELOADED, "casckpt_outside"])
        adapter.start_ranks_as(Forked)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, let the adapter undo what the file leaves behind."""
    adapter = load(Path(os.environ["CASCKPT_OUTSIDE_ADAPTER"]))
    if hasattr(adapter, "end_file") and (nextitem is None or nextitem.path != item.path):
        adapter.end_file()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of each phase of a test."""
    record(report.nodeid, report.outcome, _error(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record files that cannot be collected."""
    if report.failed:
        record(report.nodeid, report.outcome, _error(report))


def _error(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext) if report.failed else ""


def _current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def _found(name: str) -> Any:
    """Return the module, or the class in a module, of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


if __name__ == "sitecustomize":
    start()
