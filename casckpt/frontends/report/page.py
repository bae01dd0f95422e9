"""The page of a report: facts, charts and tables in one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

from casckpt._version import __version__
from casckpt.base.groups import grouped
from casckpt.base.text import lineage_text
from casckpt.base.units import format_size, time_of
from casckpt.errors import Damaged, Refused
from casckpt.frontends.interchange.new_files import new_file
from casckpt.frontends.report import charts
from casckpt.store.store import Store

if TYPE_CHECKING:
    from casckpt.store.types import Added, Heat, History, RuleUsage, StoreUsage

RUNS: Final = 12  # shown in the chart of all runs
CLOSER: Final = 3  # runs with their own charts
ROWS: Final = 150  # checkpoints shown in the table
_NAMED: Final = 20  # damaged objects shown in the list


@dataclass(frozen=True)
class _Content:
    """The content of a page."""

    url: str
    usage: StoreUsage
    history: History
    heats: dict[str, Heat]
    tags: dict[str, list[str]]
    rules: Sequence[RuleUsage]


def write_report(store: Store, path: str | os.PathLike[str]) -> int:
    """Write the report of ``store`` to the file ``path``, replacing it atomically. Returns the file's size in bytes.

    Raises NotFound if the store does not exist, Unsupported if matplotlib is missing, and StorageError.
    """
    text = page(store).encode()
    with new_file(Path(path), force=True) as made:
        made.write_bytes(text)
    return len(text)


def page(store: Store) -> str:
    """Return the report of ``store`` as HTML of less than 300 KB. Raises NotFound, Unsupported and StorageError."""
    usage = store.report()
    history = store.history([run.run for run in usage.runs[:RUNS]])
    of_runs = {run.run: store.heat(_of_run(history.added, run.run)) for run in usage.runs[:CLOSER]}
    heats = {run: changes for run, changes in of_runs.items() if changes is not None}
    tags = store.listing().tags
    names: dict[str, list[str]] = grouped(tags, lambda name: tags[name].checkpoint.id)
    return _page(_Content(store.url, usage, history, heats, names, _rules(store)))


def _rules(store: Store) -> Sequence[RuleUsage]:
    """Return the bytes that each rule would free on its own, or an empty list if damage prevents the calculation."""
    try:
        return store.footprint(keep_last=3, keep_daily=7, keep_weekly=8, keep_monthly=12).rules
    except (Damaged, Refused):
        return ()


def _of_run(added: Sequence[Added], run: str) -> list[Added]:
    return [entry for entry in added if entry.commit.run == run]


def _page(content: _Content) -> str:
    style = (files("casckpt.frontends.report") / "style.css").read_text()
    title = f"casckpt: {_text(content.url)}"
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, casckpt {__version__}"
    cards = "".join((_growth(content), _runs(content), _health(content), *_closer(content)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{style}</style></head><body>"
        f"<header><h1>{_text(content.url)}</h1><p>{made}</p></header>"
        f'<main>{_facts(content)}<div class="cards">{cards}</div>{_checkpoints(content)}</main></body></html>\n'
    )


def _facts(content: _Content) -> str:
    added = content.history.added
    logical = sum(entry.commit.committed.bytes_total for entry in added)
    stored = content.usage.bytes_blobs
    times = f"{logical / stored:.1f}" if stored and logical else "-"
    facts = (
        (str(len(added)), f"checkpoints of {len(content.usage.runs)} runs"),
        (format_size(logical), "if stored separately"),
        (format_size(stored), "stored"),
        (times, "times smaller"),
        (format_size(content.usage.freed.now), "a gc would free now"),
    )
    cells = "".join(f"<div><b>{_text(value)}</b><span>{_text(what)}</span></div>" for value, what in facts)
    return f'<section class="facts">{cells}</section>'


def _growth(content: _Content) -> str:
    added = content.history.added
    if not added:
        return '<section class="card"><h2>Growth</h2><p>There are no checkpoints.</p></section>'
    logical = list(accumulate(entry.commit.committed.bytes_total for entry in added))
    stored = list(accumulate(entry.bytes_added for entry in added))
    text = "The size of all checkpoints so far: as stored, and if each were stored separately."
    return _card("Growth", charts.growth(logical, stored), text)


def _runs(content: _Content) -> str:
    shown = content.usage.runs[:RUNS]
    if not any(run.bytes_used for run in shown):
        return ""
    more = len(content.usage.runs) - len(shown)
    text = "The size of each run." if more <= 0 else f"The largest runs; {more} more are not shown."
    return _card("Runs", charts.side_by_side(shown), text)


def _closer(content: _Content) -> Iterable[str]:
    for run in content.usage.runs[:CLOSER]:
        of_run = _of_run(content.history.added, run.run)
        if of_run:
            steps = [entry.commit.step for entry in of_run]
            sizes = [entry.commit.committed.bytes_total for entry in of_run]
            drawn = charts.run_growth(run.run, steps, sizes, [entry.bytes_added for entry in of_run])
            yield _card(f"{run.run}: each checkpoint", drawn, "The size of each, and the part of it that was new.")
        if run.run in content.heats:
            drawn = charts.heat_map(run.run, content.heats[run.run])
            yield _card(
                f"{run.run}: what changed",
                drawn,
                "How much of each layer changed since the previous step.",
            )


def _health(content: _Content) -> str:
    usage, freed = content.usage, content.usage.freed
    rows = [
        f"A gc without rules would free {format_size(freed.now)} now, and {format_size(freed.later)} later.",
        "Later means after the purge of forgotten checkpoints.",
        f"{format_size(usage.bytes_unneeded)} do not belong to a live checkpoint: leftovers and saves in progress.",
        f"Several runs share {format_size(usage.bytes_shared)}.",
    ]
    damage = [
        *(f"blob {blob} is marked as damaged" for blob in content.history.damaged),
        *(f"the record {key} cannot be read" for key in content.history.damaged_records),
        *(f"checkpoint {id} cannot be read" for id in usage.unreadable),
    ]
    if damage:
        shown = "".join(f"<li>{_text(line)}</li>" for line in damage[:_NAMED])
        more = f"<li>and {len(damage) - _NAMED} more</li>" if len(damage) > _NAMED else ""
        verdict = (
            f'<p class="bad">The store is damaged: run casckpt verify and casckpt repair.</p><ul>{shown}{more}</ul>'
        )
    else:
        verdict = '<p class="good">No damage is known. Run casckpt verify to look for damage.</p>'
    rows += [f"gc --{rule.rule} would eventually free {format_size(rule.bytes)}." for rule in content.rules]
    lines = "".join(f"<p>{_text(row)}</p>" for row in rows)
    return f'<section class="card"><h2>Space and health</h2>{lines}{verdict}</section>'


def _checkpoints(content: _Content) -> str:
    added = content.history.added
    rows = "".join(_row(entry, content.tags.get(entry.commit.id, [])) for entry in reversed(added[-ROWS:]))
    head = "".join(f"<th>{name}</th>" for name in ("Checkpoint", "Saved (UTC)", "Size", "Added", "Why"))
    more = f"<p>The newest {ROWS} of {len(added)} checkpoints.</p>" if len(added) > ROWS else ""
    return (
        f'<section class="wide"><h2>What each checkpoint added</h2>{more}'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _row(entry: Added, named: Sequence[str]) -> str:
    commit = entry.commit
    marks = "".join(f" <i>{_text(name)}</i>" for name in sorted(named))
    lineage = lineage_text(commit.committed.lineage)
    origin = f"<br><small>{_text(lineage)}</small>" if lineage else ""
    cells = (
        ("", f"{_text(f'{commit.run}@{commit.step}')}{marks}{origin}"),
        ("Saved", f"{time_of(commit.committed.created_at):%Y-%m-%d %H:%M}"),
        ("Size", format_size(commit.committed.bytes_total)),
        ("Added", format_size(entry.bytes_added)),
        ("", _text(entry.why)),
    )
    return "<tr>" + "".join(f'<td data-what="{what}">{cell}</td>' for what, cell in cells) + "</tr>"


def _card(title: str, drawn: str, text: str) -> str:
    label = _text(title)
    svg = drawn.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f'<section class="card"><h2>{label}</h2><p>{_text(text)}</p>{svg}</section>'


def _text(text: str, most: int = 300) -> str:
    """Escape text from a store for use in a page."""
    return escape(charts.printable(text if len(text) <= most else f"{text[:most]}..."))
