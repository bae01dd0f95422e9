"""The page of a report: facts, charts and tables, in one file."""

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
from casckpt.base.durations import time_of
from casckpt.base.groups import grouped
from casckpt.base.sizes import format_size
from casckpt.errors import Damaged, Refused
from casckpt.frontends.interchange.new_files import new_file
from casckpt.frontends.report import charts
from casckpt.store.store import Store

if TYPE_CHECKING:
    from casckpt.store.types import Added, Heat, History, RuleUsage, StoreUsage

RUNS: Final = 12  # beside each other
CLOSER: Final = 3  # runs with charts of their own
ROWS: Final = 150  # checkpoints in the table: the newest
_NAMED: Final = 20  # damaged things by name


@dataclass(frozen=True)
class _Found:
    """All that a page shows."""

    url: str
    usage: StoreUsage
    history: History
    heats: dict[str, Heat]
    tags: dict[str, list[str]]
    rules: Sequence[RuleUsage]


def write_report(store: Store, path: str | os.PathLike[str]) -> int:
    """Write the report of ``store`` to the file ``path``, in place of what is there; its bytes.

    The file is there as a whole or not at all. Raises NotFound where there is no store, Unsupported without matplotlib,
    StorageError.
    """
    text = page(store).encode()
    with new_file(Path(path), force=True) as made:
        made.write_bytes(text)
    return len(text)


def page(store: Store) -> str:
    """Give the report of ``store`` as HTML, below 300 KB. Raises NotFound, Unsupported, StorageError."""
    usage = store.report()
    history = store.history([run.run for run in usage.runs[:RUNS]])
    heats = {run.run: store.heat(_of_run(history.added, run.run)) for run in usage.runs[:CLOSER]}
    tags = store.listing().tags
    named: dict[str, list[str]] = grouped(tags, lambda name: tags[name].checkpoint.id)
    drawn = {run: heat for run, heat in heats.items() if heat is not None}
    return _page(_Found(store.url, usage, history, drawn, named, _rules(store)))


def _rules(store: Store) -> Sequence[RuleUsage]:
    """Give what some rules would free, each by itself; nothing where damage stands in the way, which the page names."""
    try:
        return store.footprint(keep_last=3, keep_daily=7, keep_weekly=8, keep_monthly=12).rules
    except (Damaged, Refused):
        return ()


def _of_run(added: Sequence[Added], run: str) -> list[Added]:
    return [one for one in added if one.commit.run == run]


def _page(found: _Found) -> str:
    style = (files("casckpt.frontends.report") / "style.css").read_text()
    title = f"casckpt: {_text(found.url)}"
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, casckpt {__version__}"
    cards = "".join((_growth(found), _runs(found), _health(found), *_closer(found)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{style}</style></head><body>"
        f"<header><h1>{_text(found.url)}</h1><p>{made}</p></header>"
        f'<main>{_facts(found)}<div class="cards">{cards}</div>{_checkpoints(found)}</main></body></html>\n'
    )


def _facts(found: _Found) -> str:
    added = found.history.added
    logical = sum(one.commit.committed.bytes_total for one in added)
    stored = found.usage.bytes_blobs
    times = f"{logical / stored:.1f}" if stored and logical else "-"
    facts = (
        (str(len(added)), f"checkpoints of {len(found.usage.runs)} runs"),
        (format_size(logical), "if stored one by one"),
        (format_size(stored), "stored"),
        (times, "times smaller"),
        (format_size(found.usage.freed.now), "a gc would free now"),
    )
    cells = "".join(f"<div><b>{_text(value)}</b><span>{_text(what)}</span></div>" for value, what in facts)
    return f'<section class="facts">{cells}</section>'


def _growth(found: _Found) -> str:
    added = found.history.added
    if not added:
        return '<section class="card"><h2>Growth</h2><p>There are no checkpoints.</p></section>'
    logical = list(accumulate(one.commit.committed.bytes_total for one in added))
    stored = list(accumulate(one.bytes_added for one in added))
    text = "What all checkpoints so far take, and what they would take one by one."
    return _card("Growth", charts.growth(logical, stored), text)


def _runs(found: _Found) -> str:
    shown = found.usage.runs[:RUNS]
    if not any(run.bytes_used for run in shown):
        return ""
    more = len(found.usage.runs) - len(shown)
    text = "What they take." if more <= 0 else f"The largest; {more} more are not shown."
    return _card("Runs", charts.side_by_side(shown), text)


def _closer(found: _Found) -> Iterable[str]:
    for run in found.usage.runs[:CLOSER]:
        of_run = _of_run(found.history.added, run.run)
        if of_run:
            steps = [one.commit.step for one in of_run]
            sizes = [one.commit.committed.bytes_total for one in of_run]
            drawn = charts.run_growth(run.run, steps, sizes, [one.bytes_added for one in of_run])
            yield _card(f"{run.run}: each checkpoint", drawn, "Its size, and how much of it no earlier checkpoint had.")
        if run.run in found.heats:
            drawn = charts.heat_map(run.run, found.heats[run.run])
            yield _card(
                f"{run.run}: what changed",
                drawn,
                "How much of each layer changed since the previous step.",
            )


def _health(found: _Found) -> str:
    usage, freed = found.usage, found.usage.freed
    rows = [
        f"A gc without rules would free {format_size(freed.now)} now, and {format_size(freed.later)} later.",
        "Later means once what is forgotten can no longer be restored.",
        f"{format_size(usage.bytes_unneeded)} belong to no live checkpoint: leftovers, and saves in progress.",
        f"Several runs share {format_size(usage.bytes_shared)}.",
    ]
    damage = [
        *(f"blob {blob} is marked as damaged" for blob in found.history.damaged),
        *(f"the record {key} cannot be read" for key in found.history.damaged_records),
        *(f"checkpoint {id} cannot be read" for id in usage.unreadable),
    ]
    if damage:
        shown = "".join(f"<li>{_text(line)}</li>" for line in damage[:_NAMED])
        more = f"<li>and {len(damage) - _NAMED} more</li>" if len(damage) > _NAMED else ""
        said = f'<p class="bad">There is damage: see casckpt verify, and casckpt repair.</p><ul>{shown}{more}</ul>'
    else:
        said = '<p class="good">No damage is known. casckpt verify looks for it.</p>'
    rows += [f"gc --{one.rule} would free {format_size(one.bytes)} in the end." for one in found.rules]
    lines = "".join(f"<p>{_text(row)}</p>" for row in rows)
    return f'<section class="card"><h2>Space and health</h2>{lines}{said}</section>'


def _checkpoints(found: _Found) -> str:
    added = found.history.added
    rows = "".join(_row(one, found.tags.get(one.commit.id, [])) for one in reversed(added[-ROWS:]))
    head = "".join(f"<th>{name}</th>" for name in ("Checkpoint", "Saved (UTC)", "Size", "Added", "Why"))
    more = f"<p>The newest {ROWS} of {len(added)}.</p>" if len(added) > ROWS else ""
    return (
        f'<section class="wide"><h2>What each checkpoint added</h2>{more}'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _row(one: Added, named: Sequence[str]) -> str:
    commit = one.commit
    marks = "".join(f" <i>{_text(name)}</i>" for name in sorted(named))
    cells = (
        ("", f"{_text(f'{commit.run}@{commit.step}')}{marks}"),
        ("Saved", f"{time_of(commit.committed.created_at):%Y-%m-%d %H:%M}"),
        ("Size", format_size(commit.committed.bytes_total)),
        ("Added", format_size(one.bytes_added)),
        ("", _text(one.why)),
    )
    return "<tr>" + "".join(f'<td data-what="{what}">{cell}</td>' for what, cell in cells) + "</tr>"


def _card(title: str, drawn: str, text: str) -> str:
    label = _text(title)
    svg = drawn.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f'<section class="card"><h2>{label}</h2><p>{_text(text)}</p>{svg}</section>'


def _text(text: str, most: int = 300) -> str:
    """Text of a store as text of a page, whatever is in it."""
    return escape(charts.printable(text if len(text) <= most else f"{text[:most]}..."))
