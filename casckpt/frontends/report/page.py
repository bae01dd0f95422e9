"""The page of a report: facts, charts and tables in one file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError
from casckpt.frontends.interchange.new_files import replace_file
from casckpt.frontends.report import charts
from casckpt.plan.retention import Policy
from casckpt.store.store import Store

if TYPE_CHECKING:
    from casckpt.store.types import Added, RuleUsage, RunUsage, StoreUsage

RUNS: Final = 12  # shown in the chart of all runs
CLOSER: Final = 3  # runs with their own charts
ROWS: Final = 150  # checkpoints shown in the table
_NAMED: Final = 20  # damaged objects shown in the list
_LAYERS: Final = 40  # groups of layers shown in a heat map
_RULES: Final = Policy(keep_last=3, keep_daily=7, keep_weekly=8, keep_monthly=12)


def write_report(store: Store, path: str | os.PathLike[str]) -> int:
    """Write the report of ``store`` to the file ``path``, replacing it atomically. Returns the file's size in bytes.

    Raises NotFound if the store does not exist, Unsupported if matplotlib is missing, and StorageError.
    """
    text = page(store).encode()
    replace_file(Path(path), text)
    return len(text)


def page(store: Store) -> str:
    """Return the report of ``store`` as HTML of less than 300 KB. Raises NotFound, Unsupported and StorageError."""
    listing, sizes = store.listing(), store.sizes()
    usage = sizes.usage()
    added = sizes.growth([run.run for run in usage.runs[:RUNS]])
    damage = [
        *(f"blob {blob} is marked as damaged" for blob in sizes.damaged()),
        *(f"the record {key} cannot be read" for key in listing.damaged_records),
        *(f"checkpoint {id} cannot be read" for id in usage.unreadable),
    ]
    rules = () if listing.damaged_tags else sizes.rules(_RULES)  # such a tag protects an unknown checkpoint
    tags: dict[str, list[str]] = grouped(listing.tags, lambda name: listing.tags[name].checkpoint.id)
    cards = (_growth(added), _runs(usage.runs), _health(usage, damage, rules), *_closer(store, usage.runs, added))
    body = f'{_facts(usage, added)}<div class="cards">{"".join(cards)}</div>{_checkpoints(added, tags)}'
    return _page(store.url, body)


def heat(store: Store, compared: Sequence[Added]) -> dict[str, list[float]]:
    """Return the share of each layer's bytes that changed at each of a run's compared checkpoints.

    The layers are those of the newest one. There are none if it cannot be read, or if there is no such checkpoint.
    """
    try:
        tensors = Checkpoint(store.repository, compared[-1].commit).tensors if compared else {}
    except CasckptError:
        return {}
    groups = group(tensors)
    sizes = summed({key: tensor.bytes for key, tensor in tensors.items()}, groups)
    changes = [summed(entry.changed or {}, groups) for entry in compared]
    return {
        name: [min(change.get(name, 0) / nbytes, 1.0) for change in changes] for name, nbytes in sizes.items() if nbytes
    }


def layer_of(key: str, width: int = 1) -> str:
    """Return a key's group: the key up to its first number ("model.layers.3"), or without its last element.

    ``width``: the number of layers in one group ("model.layers.0-3").
    """
    elements = key.split(".")
    for place, element in enumerate(elements):
        if element.isdecimal() and place:
            return ".".join((*elements[:place], _span(int(element), width)))
    return ".".join(elements[:-1] or elements)


def _span(number: int, width: int) -> str:
    first = number - number % width
    return f"{first}-{first + width - 1}" if width > 1 else str(number)


def _start_of(key: str, elements: int) -> str:
    return ".".join(key.split(".")[:elements])


def group(keys: Iterable[str], most: int = _LAYERS) -> dict[str, str]:
    """Return the group of each key, in key order, with at most ``most`` groups in total.

    If there are more layers, neighboring layers share a group. If there are still too many groups, keys with the same
    first two elements share a group, and if necessary, keys with the same first element. As a last resort, the last
    groups are combined into "...".
    """
    keys, groups = list(keys), dict[str, str]()
    by_layers: list[tuple[Callable[[str, int], str], int]] = [(layer_of, width) for width in (1, 2, 4, 8, 16, 32, 64)]
    for group_of, size in (*by_layers, (_start_of, 2), (_start_of, 1)):
        groups = {key: group_of(key, size) for key in keys}
        if len(set(groups.values())) <= most:
            return groups
    kept = list(dict.fromkeys(groups.values()))[: most - 1]
    return {key: name if name in kept else "..." for key, name in groups.items()}


def summed(nbytes: Mapping[str, int], groups: Mapping[str, str]) -> dict[str, int]:
    """Sum the bytes of the keys by group. Skip keys that have no group."""
    total = Counter[str]()
    for key, size in nbytes.items():
        if key in groups:
            total[groups[key]] += size
    return total


def _page(url: str, body: str) -> str:
    style = (files("casckpt.frontends.report") / "style.css").read_text()
    title = f"casckpt: {_text(url)}"
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, casckpt {__version__}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{style}</style></head><body>"
        f"<header><h1>{_text(url)}</h1><p>{made}</p></header>"
        f"<main>{body}</main></body></html>\n"
    )


def _facts(usage: StoreUsage, added: Sequence[Added]) -> str:
    logical = sum(entry.commit.committed.bytes_total for entry in added)
    stored = usage.bytes_blobs
    times = f"{logical / stored:.1f}" if stored and logical else "-"
    facts = (
        (str(len(added)), f"checkpoints of {len(usage.runs)} runs"),
        (format_size(logical), "if stored separately"),
        (format_size(stored), "stored"),
        (times, "times smaller"),
        (format_size(usage.freed.now), "a gc would free now"),
    )
    cells = "".join(f"<div><b>{_text(value)}</b><span>{_text(what)}</span></div>" for value, what in facts)
    return f'<section class="facts">{cells}</section>'


def _growth(added: Sequence[Added]) -> str:
    if not added:
        return '<section class="card"><h2>Growth</h2><p>There are no checkpoints.</p></section>'
    logical = list(accumulate(entry.commit.committed.bytes_total for entry in added))
    stored = list(accumulate(entry.bytes_added for entry in added))
    text = "The size of all checkpoints so far: as stored, and if each were stored separately."
    return _card("Growth", charts.growth(logical, stored), text)


def _runs(runs: Sequence[RunUsage]) -> str:
    shown = runs[:RUNS]
    if not any(run.bytes_used for run in shown):
        return ""
    more = len(runs) - len(shown)
    text = "The size of each run." if more <= 0 else f"The largest runs; {more} more are not shown."
    return _card("Runs", charts.side_by_side(shown), text)


def _closer(store: Store, runs: Sequence[RunUsage], added: Sequence[Added]) -> Iterable[str]:
    for run in (usage.run for usage in runs[:CLOSER]):
        of_run = [entry for entry in added if entry.commit.run == run]
        if of_run:
            steps = [entry.commit.step for entry in of_run]
            sizes = [entry.commit.committed.bytes_total for entry in of_run]
            drawn = charts.run_growth(run, steps, sizes, [entry.bytes_added for entry in of_run])
            yield _card(f"{run}: each checkpoint", drawn, "The size of each, and the part of it that was new.")
        compared = [entry for entry in of_run if entry.changed is not None]
        if shares := heat(store, compared):
            drawn = charts.heat_map(run, [entry.commit.step for entry in compared], shares)
            yield _card(f"{run}: what changed", drawn, "How much of each layer changed since the previous step.")


def _health(usage: StoreUsage, damage: Sequence[str], rules: Sequence[RuleUsage]) -> str:
    freed = usage.freed
    rows = [
        f"A gc without rules would free {format_size(freed.now)} now, and {format_size(freed.later)} later.",
        "Later means after the purge of forgotten checkpoints.",
        f"{format_size(usage.bytes_unneeded)} do not belong to a live checkpoint: leftovers and saves in progress.",
        f"Several runs share {format_size(usage.bytes_shared)}.",
    ]
    if damage:
        shown = "".join(f"<li>{_text(line)}</li>" for line in damage[:_NAMED])
        more = f"<li>and {len(damage) - _NAMED} more</li>" if len(damage) > _NAMED else ""
        verdict = (
            f'<p class="bad">The store is damaged: run casckpt verify and casckpt repair.</p><ul>{shown}{more}</ul>'
        )
    else:
        verdict = '<p class="good">No damage is known. Run casckpt verify to look for damage.</p>'
    rows += [f"gc --{rule.rule} would eventually free {format_size(rule.bytes)}." for rule in rules]
    lines = "".join(f"<p>{_text(row)}</p>" for row in rows)
    return f'<section class="card"><h2>Space and health</h2>{lines}{verdict}</section>'


def _checkpoints(added: Sequence[Added], tags: Mapping[str, Sequence[str]]) -> str:
    rows = "".join(_row(entry, tags.get(entry.commit.id, [])) for entry in reversed(added[-ROWS:]))
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


def _text(text: str) -> str:
    """Escape text from a store for use in a page."""
    return escape(charts.printable(text if len(text) <= 300 else f"{text[:300]}..."))
