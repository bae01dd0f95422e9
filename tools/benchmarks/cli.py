"""The command line of tools/bench."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import machine, peers, results
from benchmarks.harness import Void
from benchmarks.peers.base import Peer
from benchmarks.peers.before import Before
from benchmarks.results import Report, ScenarioResult
from benchmarks.scenarios import SCENARIOS
from benchmarks.scenarios.base import Options
from benchmarks.show import plot, table
from benchmarks.traces import default_folder

_ROOT = Path(__file__).resolve().parent.parent.parent
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_QUICK_ROUNDS = 2
_ON_GPU = ("save", "async", "load", "small")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run scenarios or show earlier results. Return the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"no scenario is called {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    if chosen.device != "cpu" and not set(chosen.scenarios or SCENARIOS) <= set(_ON_GPU):
        parser.error(f"--device {chosen.device} is for {', '.join(_ON_GPU)}; pass the names of those that you want")
    if chosen.results:
        if chosen.scenarios:
            parser.error("--from shows earlier results and does not run anything")
        try:
            report = results.read_json(chosen.results)
        except ValueError as error:
            parser.error(str(error))
        for scenario in report.scenarios:
            table.show(scenario)
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C, the saved files are removed
        try:
            report = _run(chosen)
        except Void as error:
            print(f"bench: void: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    _write(report, chosen)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/bench", description=f"Measure casckpt against its peers. Scenarios: {', '.join(SCENARIOS)}."
    )
    add = parser.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help="scenarios to run (default: all)")
    add("--size", type=_size, help="bytes of a state (1.5G, 64M); default: depends on the scenario")
    add("--rounds", type=int, default=7, help="number of rounds that count (7)")
    add("--peers", type=_peers, default=peers.chosen("default"), metavar="A,B",
        help=f"{', '.join(peers.PEERS)}; or groups: {', '.join(peers.GROUPS)}. Default: default")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help=f"where the states of {', '.join(_ON_GPU)} are")
    add("--before", type=_tree, metavar="TREE", help="also compare with casckpt from a different checkout, as a peer")
    add("--dir", type=Path, help="folder to save to, on the disk to be measured (bench-results/)")
    add("--traces", type=Path, help="folder of the training traces (the user's cache); for deltas, coding")
    add("--json", type=Path, help="file for the results (bench-results/<time>.json)")
    add("--plot", type=Path, metavar="DIR", help="folder in which to draw a picture of each scenario")
    add("--no-rounds", action="store_true", help="write only medians and ranges, as in docs/benchmarks/")
    add("--from", dest="results", type=Path, action="extend", nargs="+", metavar="FILE",
        help="do not run anything; show, draw or write earlier results; several of a scenario are merged")  # fmt: skip
    add("--quick", action="store_true", help="smoke run: tiny states, 2 rounds, meaningless figures")
    add("--full", action="store_true", help="history, experts: ten times as many saves or tensors")
    return parser


def _size(text: str) -> int:
    unit = text[-1:].upper()
    try:
        return int(float(text[:-1]) * _UNITS[unit]) if unit in _UNITS else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 64M or 1.5G") from error


def _tree(text: str) -> Path:
    tree = Path(text).resolve()
    if not (tree / "tools" / "benchmarks").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a casckpt checkout")
    return tree


def _peers(text: str) -> list[type[Peer]]:
    try:
        return peers.chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _run(chosen: argparse.Namespace) -> Report:
    above = (chosen.dir or _ROOT / "bench-results").resolve()
    above.mkdir(parents=True, exist_ok=True)
    report = Report(machine.describe(above, gpu=chosen.device != "cpu"))
    for name in chosen.scenarios or SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=above) as folder, table.progress(name) as tell:
            options = Options(
                folder=Path(folder),
                peers=[*chosen.peers, *([Before] if chosen.before else [])],
                rounds=_QUICK_ROUNDS if chosen.quick else chosen.rounds,
                before=chosen.before,
                traces=(chosen.traces or default_folder()).resolve(),
                threads=len(os.sched_getaffinity(0)),
                device=chosen.device,
                size=chosen.size,
                quick=chosen.quick,
                full=chosen.full,
                tell=tell,
            )
            found = _timed(name, options)
        table.show(found)
        report.scenarios.append(found)
    return report


def _timed(name: str, options: Options) -> ScenarioResult:
    started = time.monotonic()
    found = SCENARIOS[name](options)
    found.started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found.seconds = round(time.monotonic() - started, 1)
    found.commit = machine.commit(_ROOT)
    found.parameters["quick"] = int(options.quick)
    if options.device != "cpu":
        found.parameters["device"] = options.device
    return found


def _write(report: Report, chosen: argparse.Namespace) -> None:
    if not chosen.results or chosen.json:
        now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        path = chosen.json or _ROOT / "bench-results" / f"{now}.json"
        results.write_json(report, path, rounds=not chosen.no_rounds)
        print(f"results: {path}")
    if chosen.plot:
        for path in plot.draw(report, chosen.plot):
            print(f"picture: {path}")
