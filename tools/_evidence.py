"""See tools/evidence. Adds up the counts that tests write (tests/support/tally.py)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from planted import PLANTED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- evidence -->\n", "<!-- end -->"
ROWS = {
    "checked states of the protocol models": "states of models",
    "completely explored models without a loss": "models that are SAFE",
    "models with a planted mistake that is detected": "models that are UNSAFE",
    "SIGKILL right before or after a storage call": "SIGKILL at a call of the storage",
    "SIGKILL right before or after a call to a bucket": "SIGKILL at a call of a bucket",
    "SIGKILL right before or after a system call": "SIGKILL at a system call",
    "processes stopped (SIGSTOP) at a storage call, then continued": "SIGSTOP at a call of the",
    "processes stopped (SIGSTOP) at a call to a bucket, then continued": "SIGSTOP at a call of a",
    "power losses that keep none, some or all names not yet durable": "power lost",
    "processes that die right before or after a change of the storage": "change of a storage: killed",
    "changes of the storage without an answer": "change of a storage: no answer",
    "calls that failed without an effect": "fault: fail before",
    "calls that failed after their effect": "fault: fail after",
    "calls delayed while another process continues": "fault: call something",
    "truncated reads": "fault: the object ends",
    "reads with a wrong byte": "fault: one byte",
    "executed requests without an answer": "network: done, but the connection",
    "executed requests answered with 500": "network: done, but the answer",
    "requests throttled with 503": "network: not done: 503",
    "requests reset in transit": "network: the connection is reset",
    "truncated answers": "network: done, and reset",
    "requests on connections that died unnoticed": "network: sent on an abandoned",
    "clocks set back or ahead at a storage call": "clocks that jump",
    "delayed requests": "network: done a little later",
    "requests refused with 403": "network: refused",
    "randomly changed inputs of importers": "bent input",
    "randomly changed bytes for decoders": "bent bytes",
    "training runs that ckpt-chaos killed, continued with equal results": "ckpt-chaos",
    "system calls that strace failed in plain commands": "strace",
    "power losses on LazyFS, during or after a command": "lazyfs",
    "planted bugs that the default run detects": "planted",
}
"""The name of each row of the table, and the beginning of its lines in the tally."""
ROWS |= {f"soak in {where}": f"soak in {where}" for where in ("a folder", "a bucket")}


def tests(arguments: Sequence[str]) -> Counter[str]:
    """Run the tests and return their counts. Exit if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally"
        told = os.environ | {"CASCKPT_TALLY": str(tally)}
        if subprocess.run([ROOT / "tools" / "test", *arguments], env=told, check=False).returncode:
            sys.exit("tests fail: nothing was written")
        return added(tally.read_text() if tally.exists() else "")


def added(text: str) -> Counter[str]:
    """Add up the lines of a tally."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        count, _, what = line.partition(" ")
        found[what] += int(count)
    return found


def soaked(folder: Path) -> dict[str, str]:
    """Return the counts of tools/soak over all runs. Exit if one of the runs has failed."""
    if (folder / "failures").exists():
        sys.exit(f"{folder / 'failures'} lists broken invariants: nothing was written")
    counts = Counter(json.loads((folder / "counts.json").read_text()))
    loads, leased = counts["load"] + counts["load under a lease"], counts["load under a lease"]
    told = (
        f"{counts['seconds'] / 3600:.2f} hours",
        f"{counts['save']:,} saves ({counts['transactions revoked by gc']:,} revoked by a gc)",
        f"{loads:,} loads ({leased:,} under a lease) and {counts['update']:,} updates, all compared",
        f"{counts['gc']:,} gcs that deleted {counts['blobs deleted by gc']:,} blobs",
        f"{counts['killed']:,} processes killed, {counts['stopped']:,} stopped and continued",
    )
    return {_soak_in(folder): "; ".join(told)}


def soaked_on(folder: Path) -> str:
    """Return the first and last commit of the soak's runs. Runs from before the file existed do not have a commit."""
    runs = [json.loads(line) for line in (folder / "runs").read_text().splitlines()]
    first, last = (one["commit"] or "earlier ones" for one in (runs[0], runs[-1]))
    return (
        f"{datetime.fromtimestamp(runs[-1]['time'], UTC):%Y-%m-%d}, {first if first == last else f'{first} to {last}'}"
    )


def _soak_in(folder: Path) -> str:
    return f"soak in {'a folder' if (folder / 'store').is_dir() else 'a bucket'}"


def figures(counted: Mapping[str, int], soaks: Sequence[Path] = ()) -> dict[str, str]:
    """Return the current figures by name."""
    sums = {counts: sum(n for what, n in counted.items() if what.startswith(counts)) for counts in ROWS.values()}
    found = {counts: f"{count:,}" for counts, count in sums.items() if count} | {"planted": str(len(PLANTED))}
    for folder in soaks:
        found |= soaked(folder)
    return found


def with_table(
    page: str, new: Mapping[str, str], command: str, when: str, soaks: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the page with new figures.

    Rows without a new figure do not change. ``soaks``: the commits of each soak.
    """
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    held = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines()[2:]}
    for what, counts in ROWS.items():
        by = {"planted": "tools/mutants", "soak": "tools/soak"}.get(counts.split(" ")[0], command)
        had = held.get(what, "").split(" | ")[1:2]
        stands = counts == "planted" and had == [new.get(counts)]  # it was not recounted
        if counts in new and not stands:
            on = soaks.get(counts.partition(":")[0], when)
            held[what] = f"| {what} | {new[counts]} | `{by}` | {on} |"
    lines = ["| evidence | count | command | when |", "|---|---|---|---|"]
    table = "\n".join([*lines, *(held[what] for what in ROWS if what in held)])
    return f"{before}{BEGIN}{table}\n{END}{after}"


def main() -> None:
    """Run the tests and write the table."""
    parser = argparse.ArgumentParser(prog="tools/evidence", description="See tools/evidence.", allow_abbrev=False)
    parser.add_argument("--soak", type=Path, action="append", default=[])
    parser.add_argument("--no-tests", action="store_true")
    asked, arguments = parser.parse_known_args()
    counted = Counter[str]() if asked.no_tests else tests(arguments)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    when = f"{datetime.now(UTC):%Y-%m-%d}, {commit}"
    command = shlex.join(["tools/evidence", *arguments])
    soaks = {_soak_in(folder): soaked_on(folder) for folder in asked.soak}
    PAGE.write_text(with_table(PAGE.read_text(), figures(counted, asked.soak), command, when, soaks))


if __name__ == "__main__":
    main()
