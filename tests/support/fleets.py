"""Runs programs with any version of casckpt, as forks of a process that has imported torch but no casckpt.

The imports of torch and of its optimizers take 10 seconds of CPU time. ``python -P fleets.py`` reads a JSON list of
jobs per line, runs these jobs at the same time, and prints their statuses. If one fails, it ends the others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import wait
from pathlib import Path

OUT, ERR = ".out", ".err"
PATIENCE = 240.0  # seconds


def play(library: str, program: str, arguments: list[str], output: str) -> None:
    """Become a program that uses this version. Its output goes to files whose names begin with ``output``."""
    for number, suffix in ((1, OUT), (2, ERR)):
        with Path(output).with_suffix(suffix).open("wb") as file:
            os.dup2(file.fileno(), number)
    assert "casckpt" not in sys.modules
    sys.path.insert(0, library)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
    assert Path(sys.modules["casckpt"].__file__ or "").is_relative_to(library)


def run(jobs: list[tuple[str, str, list[str], str]]) -> list[int | None]:
    """Return the statuses of all jobs."""
    processes = [multiprocessing.get_context("fork").Process(target=play, args=job) for job in jobs]
    for process in processes:
        process.start()
    left = {process.sentinel: process for process in processes}
    while left:
        ready = wait([*left], timeout=PATIENCE)
        ended = [left.pop(one) for one in left.keys() & ready]
        for process in ended:
            process.join()
        if not ended or any(process.exitcode for process in ended):
            for process in left.values():
                process.kill()
    return [process.exitcode for process in processes]


if __name__ == "__main__":
    for name in ("torch._dynamo", "sqlite_utils", "msgspec", "blake3", "platformdirs"):
        __import__(name)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)  # noqa: T201 - the result
