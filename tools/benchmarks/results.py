"""The results of a run: rows of rounds, with medians, ratios and targets, and their conversion to and from JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.measure import Measured

OURS = "casckpt"
METRICS = ("blocked", "durable", "cpu", "peak", "written", "read", "asked", "stored", "load_average")
TO_OURS = "to casckpt"
RUNS = "runs"


@dataclass
class Spread:
    """The median, minimum and maximum of the rounds or, in merged results, of the runs' medians."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Sequence[float]) -> Spread:
        """Return the spread of some values."""
        return cls(statistics.median(found), min(found), max(found))


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
                self.summary[metric] = Spread.of(found)


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


def best_peers(scenario: ScenarioResult) -> list[Row]:
    """Return the row of the best peer in each group: neither casckpt nor a limit of the machine."""
    found = [row for row in scenario.rows if row.who != OURS and not row.limit and scenario.metric in row.summary]
    least = {row.group: row for row in sorted(found, key=lambda row: -(row.median(scenario.metric) or 0.0))}
    return list(least.values())


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
    """Merge several files into one report. A scenario in several files is merged too.

    Raises ValueError if its runs had different parameters.
    """
    reports = [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]
    machine = {name: _all(report.machine.get(name, "") for report in reports) for name in reports[-1].machine}
    found: dict[str, list[ScenarioResult]] = {}
    for scenario in (one for report in reports for one in report.scenarios):
        found.setdefault(scenario.name, []).append(scenario)
    return Report(machine, [merged(runs) if len(runs) > 1 else runs[0] for runs in found.values()])


def merged(runs: Sequence[ScenarioResult]) -> ScenarioResult:
    """Return the medians of the runs' medians and ratios, with their ranges. No run counts more than another."""
    first = runs[0]
    for other in runs[1:]:
        for name in {**first.parameters, **other.parameters}:
            one, two = first.parameters.get(name), other.parameters.get(name)
            if one != two:
                raise ValueError(
                    f"{first.name}: runs with {name} {one} and {two} cannot be merged; leave out one of them"
                )
    keys = dict.fromkeys((row.group, row.who, row.what) for run in runs for row in run.rows)
    return replace(
        first,
        parameters={**first.parameters, RUNS: len(runs)},
        rows=[_merged_row(key, runs) for key in keys],
        ratios=_merged_ratios(runs),
        checks=[_merged_check(index, runs) for index in range(len(first.checks))],
        started=_all(run.started for run in runs),
        seconds=sum(run.seconds for run in runs),
        commit=_all(run.commit for run in runs),
    )


def _merged_row(key: tuple[str, str, str], runs: Sequence[ScenarioResult]) -> Row:
    found = [(row, run) for run in runs for row in run.rows if (row.group, row.who, row.what) == key]
    measured = [(row, run) for row, run in found if row.summary]
    row = replace(found[0][0], rounds=[], summary={}, note=_all(row.note for row, _ in found))
    if len(measured) < len(runs):
        if measured:
            row.note = f"measured in {len(measured)} of {len(runs)} runs; {row.note}"
        return row
    for metric in measured[0][0].summary:
        medians = [one.summary[metric].median for one, _ in measured if metric in one.summary]
        row.summary[metric] = Spread.of(medians)
    ratios = [to_ours(one, run) for one, run in measured]
    known = [ratio for ratio in ratios if ratio is not None]
    if known:
        row.summary[TO_OURS] = Spread.of(known)
    return row


def _merged_ratios(runs: Sequence[ScenarioResult]) -> list[Ratio]:
    """Return the ratios that all runs have. In each run, a peer's ratio is that of its best row in this run."""
    names = {row.name: row.who for run in runs for row in run.rows}
    found: dict[tuple[str, str, str], list[Ratio]] = {}
    for one in (ratio for run in runs for ratio in run.ratios):
        found.setdefault((one.group, one.ours, names[one.peer]), []).append(one)
    return [
        replace(each[0], peer=who if len({one.peer for one in each}) > 1 else each[0].peer,
                ratio=Spread.of([one.ratio.median for one in each]))
        for (_, _, who), each in found.items()
        if len(each) == len(runs)
    ]  # fmt: skip


def _merged_check(index: int, runs: Sequence[ScenarioResult]) -> Check:
    found = [run.checks[index].value for run in runs]
    known = [value for value in found if value is not None]
    return replace(runs[0].checks[index], value=statistics.median(known) if len(known) == len(runs) else None)


def to_ours(row: Row, scenario: ScenarioResult) -> float | None:
    """Return the cost as a multiple of casckpt's first row in the group."""
    ours = next((one for one in scenario.rows if one.group == row.group and one.who == OURS), None)
    ours = ours or best(scenario.rows, OURS, scenario.metric)
    return over(row.median(scenario.metric), median_of(ours, scenario.metric))


def _all(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))
