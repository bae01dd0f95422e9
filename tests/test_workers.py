"""The workers of ``--workers`` run every test once, and report every problem."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import workers
from tests.support.workers import DIED

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import os, threading, pytest

@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    yield os.getpid()
    (tmp_path_factory.getbasetemp() / f"ended-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(40))
def test_passes(worker, number, tmp_path_factory):
    (tmp_path_factory.getbasetemp() / f"ran-{worker}-{number}").touch()

def test_is_skipped():
    pytest.skip("skipped here")

def test_fails():
    print("printed before the failure")
    assert 1 + 1 == 3

@pytest.mark.timeout(0.1)
def test_hangs():
    threading.Event().wait()
"""
DIES = """
def test_dies():
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("count", [1, 3])
def test_every_test_runs_once_and_is_reported(count: int, tmp_path: Path) -> None:
    printed = run(tmp_path, TESTS, "--workers", count)
    assert "2 failed, 40 passed, 1 skipped" in printed
    assert "assert (1 + 1) == 3" in printed
    assert "printed before the failure" in printed
    assert "skipped here" in printed
    assert "Failed: Timeout" in printed
    ran = [path.name.split("-")[1:] for path in (tmp_path / "temp").glob("ran-*")]
    assert sorted(int(number) for _, number in ran) == list(range(40))
    ended = {path.name.split("-")[1] for path in (tmp_path / "temp").glob("ended-*")}
    assert {worker for worker, _ in ran} == ended, "each worker tears its session down"


def test_the_tests_of_a_dead_worker_fail_and_the_other_worker_runs_the_rest(tmp_path: Path) -> None:
    printed = run(tmp_path, TESTS.replace("def test_is", DIES + "\ndef test_is"), "--workers", 2)
    assert DIED in printed
    assert "FAILED test_all.py::test_dies" in printed
    counts = re.findall(r"(\d+) (?:failed|passed|skipped)", printed.splitlines()[-1])
    assert sum(map(int, counts)) == 44, "the dead worker had also taken its next test"


def test_imports_of_tests_do_not_start_threads() -> None:
    """The threads would not exist in the workers."""
    assert workers.threads in ([], ["MainThread"])


def test_the_option_x_ends_a_run_at_the_first_failure(tmp_path: Path) -> None:
    printed = run(tmp_path, "def test_fails():\n    assert 0\n" + TESTS, "--workers", 2, "-x")
    assert "stopping after 1 failures" in printed


def run(folder: Path, tests: str, *options: object) -> str:
    """Run tests of a file. Return the output of pytest, which must end with the status for failures."""
    (folder / "test_all.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.workers", "-ra", f"--basetemp={folder}/temp"]
    done = subprocess.run(
        [*command, *map(str, options)], cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout
