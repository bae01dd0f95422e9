"""See tools/which-test."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from coverage import CoverageData

from _places import ROOT, scopes
from planted import PLANTED

RECORD = ROOT / "build" / "which-test.coverage"


def functions(name: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the (file, qualified name) of each function that a name may refer to, with its first and last line."""
    parts = name.split(".")
    found = {}
    for path in sorted((ROOT / "casckpt").rglob("*.py")):
        text, file = path.read_text(), str(path.relative_to(ROOT))
        module = file.removesuffix(".py").removesuffix("/__init__").split("/")
        for inside, start, end in scopes(text) if parts[-1] in text else ():
            if [*module, *inside.split(".")][-len(parts) :] == parts:
                found[file, inside] = text.count("\n", 0, start) + 1, text.count("\n", 0, end)
    return found


def planted_in(file: str, function: str) -> Iterator[str]:
    """Return the tests that kill bugs planted in a function."""
    for one in PLANTED:
        if (one.function == function or one.function.startswith(f"{function}.")) and one.place()[0] == file:
            yield f"{one.tests}  ({one.name})"


def naming(function: str) -> Iterator[str]:
    """Return the tests whose bodies contain the last part of the name (for a method, after a dot)."""
    owner, _, last = function.rpartition(".")
    before = r"\." if owner else r"(?<!\w)"
    word = re.compile(rf"{before}{re.escape(last)}(?!\w)")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if word.search(text):
            for node in ast.parse(text).body:
                inside = ast.get_source_segment(text, node) or ""
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and word.search(inside):
                    yield f"{path.relative_to(ROOT)}::{node.name}"


def recorded(file: str, lines: tuple[int, int]) -> Iterator[str]:
    """Return the tests that ran the body of a function under `--record`."""
    data = CoverageData(str(RECORD))
    data.read()
    contexts = data.contexts_by_lineno(str(ROOT / file))
    inside = {one for line, names in contexts.items() if lines[0] < line <= lines[1] for one in names}
    yield from sorted({one.partition("|")[0] for one in inside if one})


def record(tests: list[str]) -> int:
    """Run tests, and record the lines that each test ran."""
    RECORD.parent.mkdir(exist_ok=True)
    options = ["--cov=casckpt", "--cov-context=test", "--cov-report=", "--cov-append", "-q"]
    environment = os.environ | {"COVERAGE_FILE": str(RECORD), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *(tests or ["--quick"])]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> None:
    """List the tests of a function, or record them."""
    parser = argparse.ArgumentParser(prog="tools/which-test", description="Which tests cover a function?")
    parser.add_argument("what", nargs="*", metavar="FUNCTION", help="its name, or an unambiguous end of it")
    parser.add_argument(
        "--record",
        action="store_true",
        help="run these tests (default: those of --quick), and record which functions they run",
    )
    asked = parser.parse_args()
    if asked.record:
        sys.exit(record(asked.what))
    for name in asked.what:
        found = functions(name)
        if not found:
            sys.exit(f"which-test: there is no {name} in casckpt")
        for (file, function), lines in found.items():
            print(f"{file}:{lines[0]}: {function}")
            show("planted bugs", planted_in(file, function))
            show("tests that name it", naming(function))
            if RECORD.exists():
                stale = ", before the file changed" if RECORD.stat().st_mtime < (ROOT / file).stat().st_mtime else ""
                show(f"tests that ran it{stale}", recorded(file, lines))


def show(title: str, tests: Iterator[str]) -> None:
    """Print a list if it is not empty."""
    lines = list(dict.fromkeys(tests))
    print(f"  {title}: {len(lines)}")
    print(*(f"    {one}\n" for one in lines), sep="", end="")


if __name__ == "__main__":
    main()
