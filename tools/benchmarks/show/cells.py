"""How figures are formatted on the terminal and in the documentation."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.results import OURS, TO_OURS, Check, Row, ScenarioResult, Spread, best_peers, binding, over, to_ours

_NOISE = 64 << 10  # bytes that any process reads and writes
Column = tuple[str, Callable[[Row], str]]


def columns(scenario: ScenarioResult) -> list[Column]:
    """Return headings and cells. Omit columns that have no values in this scenario."""
    found: list[Column] = [("time", _time("durable")), ("CPU", _time("cpu"))]
    rows = scenario.rows
    if any("peak" in row.summary for row in rows):
        found.append(("extra memory", _size("peak")))
    if any(_differ(row) for row in rows):
        found.insert(0, ("blocked", _time("blocked")))
    if any(row.nbytes for row in rows):
        found.insert(1, ("GB/s", lambda row: _speed(row, scenario.metric)))
    found += [
        (heading, _size(metric))
        for heading, metric in (("written", "written"), ("read", "read"), ("asked", "asked"), ("stored", "stored"))
        if any((row.median(metric) or 0) >= _NOISE for row in rows)
    ]
    if any("share" in row.summary for row in rows):
        found.append(("of plain", lambda row: f"{row.summary['share'].median:.2%}" if "share" in row.summary else ""))
    if any(row.verified is not None for row in rows):
        found.insert(0, ("verified", lambda row: {True: "yes", False: "no", None: ""}[row.verified]))
    if any(row.bounds for row in rows):
        found.append(("of the limit", lambda row: _of_limit(row, scenario)))
    if any(row.who != OURS for row in rows):
        found.append(("to casckpt", lambda row: _to_ours(row, scenario)))
    return found


def seconds(found: Spread) -> str:
    """Format a time and its range."""
    factor, unit = (1.0, "s") if found.median >= 1 else (1e3, "ms")
    low, middle, high = (_short(value * factor) for value in (found.low, found.median, found.high))
    return f"{middle} ({low}-{high}) {unit}"


def ratio(found: Spread) -> str:
    """Format a ratio and its range."""
    return f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def size(value: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{_short(value / unit)} {name}"
    return f"{value:.0f} B"


def verdict(check: Check) -> str:
    """Return the verdict on a target."""
    return {None: "not measured", True: "met", False: "not met"}[check.met]


def target(check: Check) -> tuple[str, str, str, str]:
    """Return the cells for a target: name, limit, result and verdict."""
    sign = "at least" if check.at_least else "at most"
    found = "" if check.value is None else _number(check.value)
    return check.text, f"{sign} {_number(check.wanted)}", found, verdict(check)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _time(metric: str) -> Callable[[Row], str]:
    return lambda row: seconds(row.summary[metric]) if metric in row.summary else ""


def _size(metric: str) -> Callable[[Row], str]:
    return lambda row: size(row.summary[metric].median) if metric in row.summary else ""


def _speed(row: Row, metric: str) -> str:
    if metric not in ("durable", "blocked"):
        metric = "durable"
    found = row.median(metric)
    return f"{row.nbytes / found / 1e9:.2f}" if row.nbytes and found else ""


def _differ(row: Row) -> bool:
    blocked, durable = row.median("blocked"), row.median("durable")
    return blocked is not None and durable is not None and blocked < 0.99 * durable


def _of_limit(row: Row, scenario: ScenarioResult) -> str:
    """Return the fraction of the binding limit that a row reaches, and the name of the limit."""
    limit = binding(scenario.rows, row, scenario.metric)
    reached = over(limit.median(scenario.metric), row.median(scenario.metric)) if limit else None
    return f"{reached:.2f} of {limit.who}" if limit and reached is not None else ""


def _to_ours(row: Row, scenario: ScenarioResult) -> str:
    """Return the cost as a multiple of casckpt's, with the range over several runs. Mark the best peer of the group."""
    value = to_ours(row, scenario)
    if value is None:
        return ""
    text = ratio(row.summary[TO_OURS]) if TO_OURS in row.summary else f"{value:.2f}"
    return f"{text}, the best peer" if row in best_peers(scenario) else text
