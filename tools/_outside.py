"""See tools/outside."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from _result_table import ResultTable
from tests.outside import frame

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = ROOT / "tests" / "outside"
COLUMNS = ("tests of", "version", "collected", "as they are", "with casckpt", "tests that save", "differences", "when")
TABLE = ResultTable("outside", COLUMNS, keys=1)
SECONDS = 300  # for one test
NOT_STORED = "a test that saves wrote to no store"


@dataclass
class Outcome:
    """How one test ended."""

    result: str = "passed"
    error: str = ""
    saved: bool = False
    stored: bool = False

    def add(self, what: str, error: str) -> None:
        """Add a line of the record. The worst phase counts."""
        if what in {"saved", "stored"}:
            setattr(self, what, True)
        elif what == "failed" or (what == "skipped" and self.result == "passed"):
            self.result, self.error = what, self.error or error


Outcomes = dict[str, Outcome]


def outcomes(lines: Sequence[str]) -> Outcomes:
    """Read a record."""
    found: Outcomes = {}
    for line in lines:
        entry = json.loads(line)
        found.setdefault(entry["test"], Outcome()).add(entry["what"], entry["error"])
    found.pop("", None)  # a save outside tests
    return found


def differences(plain: Outcomes, ours: Outcomes) -> Iterator[tuple[str, str]]:
    """Yield each test that ends differently, with what happened."""
    for test in sorted({*plain, *ours}):
        before, now = plain.get(test), ours.get(test)
        if before is None or now is None:
            yield test, f"runs only {'with casckpt' if before is None else 'without casckpt'}"
        elif before.result != now.result:
            yield test, f"{before.result}, then {now.result}: {(now.error or before.error).strip()}"
        elif before.saved and now.result == "passed" and not now.stored:
            yield test, NOT_STORED


def explained(found: Sequence[tuple[str, str]], reasons: Mapping[str, str]) -> tuple[Counter[str], list[str]]:
    """Count differences by their reason. Also return those without a reason, and reasons that explain nothing."""
    counts: Counter[str] = Counter()
    problems = []
    used = set()
    for test, what in found:
        pattern = next((pattern for pattern in reasons if re.search(pattern, f"{test}: {what}", re.DOTALL)), None)
        if pattern is None:
            problems.append(f"no reason: {test}: {what}")
        else:
            used.add(pattern)
            counts[reasons[pattern]] += 1
    problems += [f"explains nothing: {pattern}" for pattern in reasons if pattern not in used]
    return counts, problems


def ran(adapter: Path, source: Path, python: str, arguments: Sequence[str], *, casckpt: bool) -> Outcomes:
    """Run the tests once, as they are or with casckpt."""
    module = frame.load(adapter)
    with tempfile.TemporaryDirectory() as name:
        folder, record = Path(name), Path(name) / "record"
        (folder / "path").mkdir()
        (folder / "path" / "casckpt").symlink_to(ROOT / "casckpt")
        (folder / "path" / "casckpt_outside.py").symlink_to(ADAPTERS / "frame.py")
        (folder / "path" / "sitecustomize.py").symlink_to(ADAPTERS / "frame.py")
        paths = [folder / "path", *([source / module.SOURCE] if module.SOURCE else [])]
        told = {"CASCKPT_OUTSIDE_ADAPTER": str(adapter), "CASCKPT_OUTSIDE_RECORD": str(record)}
        told |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
        if casckpt:
            told["CASCKPT_OUTSIDE_STORES"] = str(folder / "stores")
        where = source
        if hasattr(module, "FOLDER"):
            where = shutil.copytree(source / module.FOLDER, folder / "copy")
        command = [python, "-m", "pytest", "-q", "-p", "casckpt_outside", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", f"--timeout={SECONDS}", f"--basetemp={folder / 'tests'}"]
        command += arguments or module.TESTS
        status = subprocess.run(command, cwd=where, env=os.environ | told, check=False).returncode
        if status not in (0, 1) or not record.exists():
            sys.exit(f"pytest ended with status {status}{'' if record.exists() else ', and ran no test'}")
        return outcomes(record.read_text().splitlines())


def counts_of(found: Outcomes) -> str:
    """Return the numbers of passed, failed, and skipped tests."""
    counts = Counter(outcome.result for outcome in found.values())
    return " / ".join(f"{counts[result]:,}" for result in ("passed", "failed", "skipped"))


def version_of(source: Path) -> str:
    """Return the commit of a checkout, or the name of a folder that is none."""
    if not (source / ".git").exists():
        return source.name
    command = ["git", "-C", str(source), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def parsed(given: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
    """Return the tool's own arguments, and those for pytest, which follow ``--`` and replace the adapter's TESTS."""
    names = sorted(p.stem.replace("_", "-") for p in ADAPTERS.glob("*.py") if not p.stem.startswith(("_", "test_")))
    names.remove("frame")
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="tools/outside", description="See tools/outside.", allow_abbrev=False)
    parser.add_argument("name", choices=names)
    parser.add_argument("--source", type=Path, required=True, help="a checkout or unpacked archive of the project")
    parser.add_argument("--version", help="what the checkout is, if it is no git checkout")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--table", action="store_true", help="write the row of docs/reliability.md")
    asked = parser.parse_args(given[:end])
    if not asked.source.is_dir():
        parser.error(f"--source {asked.source} is not a folder")
    return asked, given[end + 1 :]


def main() -> None:
    """Run the tests of one project twice, and print or record the results."""
    asked, arguments = parsed(sys.argv[1:])
    if asked.table and arguments:
        sys.exit("--table is for all TESTS of an adapter: pass options of pytest in PYTEST_ADDOPTS, not after --")
    source, adapter = asked.source.resolve(), ADAPTERS / f"{asked.name.replace('-', '_')}.py"
    plain, ours = (ran(adapter, source, asked.python, arguments, casckpt=casckpt) for casckpt in (False, True))
    found = list(differences(plain, ours))
    counts, problems = explained(found, frame.load(adapter).REASONS)
    saving = [test for test, outcome in plain.items() if outcome.saved]
    stored = sum(test in ours and ours[test].stored for test in saving)
    said = "; ".join(f"{count}: {reason}" for reason, count in counts.most_common()) or "none"
    version = asked.version or version_of(source)
    when = f"{datetime.now(UTC):%Y-%m-%d}"
    row: tuple[str, ...] = (asked.name, version, f"{len(plain):,}", counts_of(plain), counts_of(ours))
    row += (f"{len(saving):,}, {stored:,} into a store", said, when)
    print(*(f"{column}: {cell}" for column, cell in zip(COLUMNS, row, strict=True)), *problems, sep="\n")
    if asked.table and not problems:
        TABLE.write(*row)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
