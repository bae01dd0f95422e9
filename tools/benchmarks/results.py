"""The results of a run: rows of rounds, with medians, ratios and targets, and their conversion to and from JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.measure import Measured

OURS = "casckpt"
METRICS = ("blocked", "durable", "cpu", "peak", "written", "read", "asked", "stored", "load_average")


@dataclass
class Spread:
    """The median, minimum and maximum of the rounds."""

    median: float
    low: float
    high: float


@dataclass
class Row:
    """A configuration in a scenario. ``nbytes``: the bytes to save or load, or 0 if that does not apply.

    ``who``: "casckpt", a peer, or a limit of the machine (in which case ``limit`` is set). ``what``: its settings.
    ``note``: the reason for missing rounds. ``verified``: whether loads verify digests, or None if there are no loads.
    ``bounds``: the limits of such work, by ``who``. ``summary``: each metric over all rounds, from `summarise`. It is
    empty without measurements. A published row has a summary but no rounds.
    """

    group: str
    who: str
    what: str
    nbytes: int = 0
    limit: bool = False
    verified: bool | None = None
    bounds: list[str] = field(default_factory=list)
    note: str = ""
    rounds: list[Measured] = field(default_factory=list)
    summary: dict[str, Spread] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return ``who`` and ``what``."""
        return f"{self.who}, {self.what}" if self.what else self.who

    def values(self, metric: str) -> list[float]:
        """Return a metric for all rounds that have it."""
        found = [
            getattr(one, metric) if metric in METRICS else one.extra.get(metric) for one in self.rounds
        ]  # fmt: skip
        return [float(value) for value in found if value is not None]

    def median(self, metric: str) -> float | None:
        """Return the median of a metric, or None without measurements."""
        if metric in self.summary:
            return self.summary[metric].median
        found = self.values(metric)
        return statistics.median(found) if found else None

    def summarise(self) -> None:
        """Fill in ``summary``."""
        extra = dict.fromkeys(key for one in self.rounds for key in one.extra)
        for metric in (*METRICS, *extra):
            found = self.values(metric)
            if found:
                self.summary[metric] = Spread(statistics.median(found), min(found), max(found))


@dataclass
class Ratio:
    """The cost of ``peer`` divided by casckpt's.

    If it is above 1, casckpt is cheaper. The ratio is computed from the medians; the range covers all rounds.
    """

    group: str
    ours: str
    peer: str
    metric: str
    ratio: Spread


@dataclass
class Check:
    """A target and its result."""

    text: str
    wanted: float
    at_least: bool
    value: float | None

    @property
    def met(self) -> bool | None:
        """Return whether the target is met, or None if it could not be checked."""
        if self.value is None:
            return None
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted


@dataclass
class ScenarioResult:
    """The results of a scenario. ``metric``: used for its ratios and plot. ``note``: Markdown above its tables."""

    name: str
    title: str
    metric: str
    parameters: dict[str, str | int | float]
    rows: list[Row]
    ratios: list[Ratio]
    checks: list[Check]
    started: str = ""
    seconds: float = 0.0
    commit: str = ""
    note: str = ""


@dataclass
class Report:
    """One run of the benchmark on one machine."""

    machine: dict[str, str]
    scenarios: list[ScenarioResult] = field(default_factory=list)


def best(rows: list[Row], who: str, metric: str, *, group: str | None = None, what: str = "") -> Row | None:
    """Return the row of ``who`` with the lowest median. ``what``: consider only rows whose settings contain this."""
    found = [
        (median, number, row)
        for number, row in enumerate(rows)
        if row.who == who and what in row.what and group in (None, row.group)
        if (median := row.median(metric)) is not None
    ]
    return min(found)[2] if found else None


def binding(rows: list[Row], row: Row, metric: str = "durable") -> Row | None:
    """Return the binding limit of a row, which is the slowest of its bounds, each with its best row."""
    found = [best(rows, who, metric, group=row.group) for who in row.bounds]
    measured = [(median, number) for number, one in enumerate(found) if (median := median_of(one, metric)) is not None]
    return found[max(measured)[1]] if measured else None


def median_of(row: Row | None, metric: str) -> float | None:
    """Return the median of a row, or None if there is none."""
    return row.median(metric) if row else None


def ratios(rows: list[Row], metric: str) -> list[Ratio]:
    """Return the ratio of each casckpt row to the best row of each peer, by group."""
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        here = [row for row in rows if row.group == group]
        others = dict.fromkeys(row.who for row in here if row.who != OURS)
        for ours in (row for row in here if row.who == OURS and row.rounds):
            for who in others:
                peer = best(here, who, metric)
                if peer is not None and (spread := _ratio(peer, ours, metric)):
                    found.append(Ratio(group, ours.name, peer.name, metric, spread))
    return found


def _ratio(peer: Row, ours: Row, metric: str) -> Spread | None:
    one, other = peer.values(metric), ours.values(metric)
    middle = over(peer.median(metric), ours.median(metric))
    if middle is None or not all(other):
        return None
    rounds = [a / b for a, b in zip(one, other, strict=False)]
    return Spread(middle, min(rounds), max(rounds))


def over(value: float | None, other: float | None) -> float | None:
    """Return ``value`` / ``other``, if both are known."""
    return value / other if value is not None and other else None


def write_json(report: Report, path: Path, *, rounds: bool = True) -> None:
    """Write a report. Without ``rounds``, write only row summaries, one row per line, as in docs/benchmarks/."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if rounds:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        return
    kept = [replace(one, rows=[replace(row, rounds=[]) for row in one.rows]) for one in report.scenarios]
    encoded = msgspec.json.encode(replace(report, scenarios=kept))
    path.write_bytes(encoded.replace(b',{"group"', b',\n{"group"') + b"\n")


def read_json(paths: list[Path]) -> Report:
    """Merge several files into one report. If several files contain the same scenario, the last one wins."""
    reports = [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]
    scenarios = {scenario.name: scenario for report in reports for scenario in report.scenarios}
    return Report(reports[-1].machine, list(scenarios.values()))
