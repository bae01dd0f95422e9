"""A plot of each scenario: medians as bars, ranges as lines, and a panel for each group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import OURS, Report, Row, ScenarioResult

_COLOURS = {"ours": "#1b6ca8", "limit": "#b0b0b0", "peer": "#e08a2e"}
_UNITS = {"peak": ("MiB", 1 << 20), "stored": ("MiB", 1 << 20)}
_LABELS = {"durable": "seconds", "blocked": "seconds until the caller goes on", "peak": "extra memory, MiB",
           "stored": "stored, MiB", "cpu": "processor seconds"}  # fmt: skip


def draw(report: Report, folder: Path) -> Iterator[Path]:
    """Draw one SVG for each scenario that measured something."""
    import matplotlib as mpl

    mpl.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    for scenario in report.scenarios:
        if any(row.summary for row in scenario.rows):
            path = folder / f"{scenario.name}.svg"
            _draw(scenario, path)
            yield path


def _draw(scenario: ScenarioResult, path: Path) -> None:
    from matplotlib import pyplot as plt

    groups = {row.group: [one for one in scenario.rows if one.group == row.group and one.summary]
              for row in scenario.rows}  # fmt: skip
    groups = {group: rows for group, rows in groups.items() if rows}
    heights = [len(rows) + 1.2 for rows in groups.values()]
    figure, panels = plt.subplots(
        len(groups), squeeze=False, figsize=(9, 0.6 + 0.3 * sum(heights)), height_ratios=heights, layout="constrained"
    )
    for panel, (group, rows) in zip(panels[:, 0], groups.items(), strict=True):
        _bars(panel, rows, scenario.metric)
        panel.set_title(group, fontsize=9, loc="left")
    panels[-1, 0].set_xlabel(_LABELS.get(scenario.metric, scenario.metric))
    figure.suptitle(scenario.title)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bars(panel: Any, rows: list[Row], metric: str) -> None:
    _, unit = _UNITS.get(metric, ("", 1))
    spreads = [row.summary[metric] for row in rows if metric in row.summary]
    names = [row.name for row in rows if metric in row.summary]
    medians = [one.median / unit for one in spreads]
    ranges = [[(one.median - one.low) / unit for one in spreads], [(one.high - one.median) / unit for one in spreads]]
    colours = [_COLOURS["ours" if row.who == OURS else "limit" if row.limit else "peer"] for row in rows]
    panel.barh(names, medians, xerr=ranges, color=colours[: len(names)], ecolor="#444444", capsize=2)
    panel.invert_yaxis()
    panel.tick_params(labelsize=8)
