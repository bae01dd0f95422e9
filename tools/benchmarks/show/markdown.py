"""Results as pages of the site. `tools/docs` creates a page from each file in docs/benchmarks/."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.results import Report, ScenarioResult, read_json
from benchmarks.show import cells


def write_pages(folder: Path, into: Path) -> None:
    """Write a page of tables for each JSON file in ``folder`` into a new folder."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for path in sorted(folder.glob("*.json")):
        (into / f"{path.stem}.md").write_text(render(read_json([path])))


def render(report: Report) -> str:
    """Return all tables of a report as Markdown."""
    machine = report.machine
    parts = [
        f"# {machine['date']}: {machine.get('gpu', machine['cpu'])}\n",
        _table(("the machine", ""), machine.items()),
    ]
    for scenario in report.scenarios:
        parts += _scenario(scenario)
    return "\n".join(parts)


def _scenario(scenario: ScenarioResult) -> Iterable[str]:
    given = ", ".join(f"{name} {value}" for name, value in scenario.parameters.items())
    commit = f". Commit: {scenario.commit}" if scenario.commit else ""
    yield f"## {scenario.name}: {scenario.title}\n\n{given}{commit}\n"
    if scenario.note:
        yield f"{scenario.note}\n"
    columns = cells.columns(scenario)
    groups = list(dict.fromkeys(row.group for row in scenario.rows))
    for group in groups:
        rows = [row for row in scenario.rows if row.group == group]
        body = [(row.name, *((text(row) for _, text in columns) if row.summary else (row.note,))) for row in rows]
        yield _table((group or "what", *(heading for heading, _ in columns)), body)
    if scenario.ratios:
        ratios = [(r.group, r.ours, r.peer, cells.ratio(r.ratio)) for r in scenario.ratios]
        yield _table(("group", "casckpt", "against the best of", f"ratio ({scenario.metric})"), ratios)
    if scenario.checks:
        yield _table(("target", "wanted", "found", ""), map(cells.target, scenario.checks))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line([*row, *[""] * (len(head) - len(row))]) for row in rows]
    return "\n".join(lines) + "\n"


def _line(fields: Sequence[str]) -> str:
    return f"| {' | '.join(field.replace('|', '/') for field in fields)} |"
