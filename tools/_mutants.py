"""See tools/mutants. Exits with 1 if a planted bug survives. CI does not run it because it takes a long time."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from _draw import draw
from _places import Planted
from planted import PLANTED

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "planted.py"
SECONDS = 600


def copy_of_the_project(folder: Path) -> Path:
    """Copy all files that git tracks, with uncommitted changes."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def outcome(folder: Path, planted: Planted, run: str, tests: Sequence[str]) -> str:
    """Return the first test that fails with the bug but passes without it, or "" if there is none."""
    name, start, end = planted.place()
    file = folder / name
    before = file.read_text()
    file.write_text(before[:start] + planted.after + before[end:])
    try:
        found = first_failure(folder, run, tests)
    finally:
        file.write_text(before)
    if found and first_failure(folder, run, [found]):
        sys.exit(f"{found} also fails without a bug")
    return found


def first_failure(folder: Path, run: str, tests: Sequence[str]) -> str:
    """Return the first failing test, or "" if none fails. Exit if the tests cannot run."""
    chosen = [run] if run else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen, *tests]
    copied = os.environ | {"PYTHONPATH": str(folder)}  # for processes that tests start
    done = subprocess.run(command, cwd=folder, env=copied, capture_output=True, text=True, check=False, timeout=SECONDS)
    nothing_plain = done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and run == "--quick"
    if done.returncode not in (0, 1) and not nothing_plain:  # for example, a name is wrong
        sys.exit(f"pytest left with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    return found[1] if found else ""


def list_killer(planted: Planted, test: str) -> None:
    """Write the test that kills a bug into the list."""
    before, name, after = LIST.read_text().partition(f'    "{planted.name}": (\n')
    LIST.write_text(before + name + after.replace(f'"{planted.tests}"', f'"{test}"', 1))


def plant_all(chosen: Sequence[Planted], run: str, jobs: int, *, anew: bool) -> Iterator[str]:
    """Try all bugs, ``jobs`` at a time, each in its own copy of the project. Yield the names of those that survive.

    ``anew``: run all tests in the file of a bug's test, and list the first one that fails.
    """
    with tempfile.TemporaryDirectory(prefix="casckpt-mutants-") as name, ThreadPoolExecutor(jobs) as pool:
        copies = [copy_of_the_project(Path(name, str(number))) for number in range(jobs)]

        def plant(planted: Planted) -> tuple[Planted, str, float]:
            began, folder = time.monotonic(), copies.pop()
            tests = [planted.tests.partition("::")[0]] if anew else planted.tests.split()
            try:
                return planted, outcome(folder, planted, run, tests), time.monotonic() - began
            finally:
                copies.append(folder)

        for planted, test, seconds in pool.map(plant, chosen):
            print(f"{seconds:5.0f} s  {planted.name}\n         {test or 'SURVIVED'}", flush=True)
            if not test:
                yield planted.name
            elif anew:
                list_killer(planted, test)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tools/mutants", description="Plant bugs, and check that tests detect them.")
    parser.add_argument("words", nargs="*", help="bugs whose names contain one of these words (default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--quick", action="store_const", dest="run", const="--quick", help="use only the tests of tools/test --quick"
    )
    which.add_argument(
        "--full", action="store_const", dest="run", const="--full", help="use the tests of tools/test --full"
    )
    anew = "run all tests in the file of a bug's test, and write the first that fails to tools/planted.py"
    parser.add_argument("--table", action="store_true", help=anew)
    parser.add_argument("--jobs", type=int, default=1, help="how many bugs to try at a time")
    drawn = "plant N new bugs, drawn evenly over the given files and folders; run the tests of the bugs there"
    parser.add_argument("--draw", type=int, metavar="N", help=drawn)
    parser.add_argument("--seed", type=int, default=0, help="the random seed of --draw (0)")
    asked = parser.parse_args()
    if asked.draw and (asked.table or not asked.words):
        parser.error("--draw needs files or folders of casckpt, and excludes --table")
    return asked


def main() -> None:
    """Plant all bugs, or those whose names contain one of the given words."""
    asked = arguments()
    named = [one for one in PLANTED if not asked.words or any(word in one.name for word in asked.words)]
    chosen = list(draw(asked.words, asked.draw, asked.seed)) if asked.draw else named
    survived = list(plant_all(chosen, asked.run or "", asked.jobs, anew=asked.table))
    print(f"{len(chosen)} planted, {len(survived)} survived")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
