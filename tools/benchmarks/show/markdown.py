"""Results as tables of a page, between two marks; what stands around them is left alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.results import Report, ScenarioResult
from benchmarks.show import cells

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def write(report: Report, path: Path) -> None:
    """Put the tables into a page; a page of their own where there is none."""
    text = path.read_text() if path.exists() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"bench: {path} lacks the marks {BEGIN} and {END}, between which the tables go")
    path.write_text(f"{before}{BEGIN}\n\n{render(report)}\n{END}{after}")


def render(report: Report) -> str:
    """All tables."""
    parts = [_table(("the machine", ""), report.machine.items())]
    for scenario in report.scenarios:
        parts += _scenario(scenario)
    return "\n".join(parts)


def _scenario(scenario: ScenarioResult) -> Iterable[str]:
    given = ", ".join(f"{name} {value}" for name, value in scenario.parameters.items())
    yield f"### {scenario.name}: {scenario.title}\n\n{given}\n"
    columns = cells.columns(scenario)
    groups = list(dict.fromkeys(row.group for row in scenario.rows))
    for group in groups:
        rows = [row for row in scenario.rows if row.group == group]
        body = [(row.name, *((text(row) for _, text in columns) if row.rounds else (row.note,))) for row in rows]
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
