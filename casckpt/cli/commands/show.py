"""``casckpt show``, and ``casckpt diff``, which compares two checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from casckpt.base.text import lineage_text
from casckpt.cli.describe import brief, plain, summary
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import (
    Column,
    coded,
    count,
    facts,
    moment,
    name,
    printable,
    say,
    say_all,
    shortened,
    size,
    states,
    summed,
    table,
    unusual,
)
from casckpt.errors import MissingKey

if TYPE_CHECKING:
    from casckpt.contents.checkpoint import Checkpoint
    from casckpt.store.store import Store

FEW = 20
_FEW_VALUES = 8  # on one line; Lightning's loops have hundreds
_COLUMNS = (
    Column("TENSOR"),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("SIZE", "right"),
)
_HEALTH = (Column("LARGEST", "right"), Column("UNUSUAL"))


@store_command("show")
@click.argument("ref")
@click.option("--tensors", "all_tensors", is_flag=True, help="List all tensors, no matter how many there are.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Show only tensors whose key matches. May be repeated.")
def command(session: Session, ref: str, *, all_tensors: bool, keys: tuple[str, ...]) -> None:
    """Show the content of a checkpoint.

    Also shows statistics of its save. With --json, the output lists all tensors.
    """
    result = details(session.store, ref, keys)
    shown = all_tensors or bool(keys) or len(result["tensors"]) <= FEW
    session.give(result, lambda result: _text(result, shown))


def details(store: Store, ref: str, patterns: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a checkpoint as plain data. Raises MissingKey for a pattern that does not match any tensor."""
    checkpoint = store.get(ref)
    details = checkpoint.details
    chosen, health = _chosen(checkpoint, patterns), checkpoint.health or {}
    return summary(checkpoint) | {
        "tags": checkpoint.tags,
        "signers": checkpoint.signers,
        "metadata": checkpoint.metadata,
        "lineage": checkpoint.lineage or None,
        "parent": details.parent,
        "world_size": details.world_size,
        "versions": {"casckpt": details.casckpt, "torch": details.torch},
        "attachments": [{"name": name, "bytes": nbytes} for name, nbytes in store.attachments(checkpoint).items()],
        "objects": list(details.objects),
        "pickled": list(details.pickled),
        "differing": list(details.differing),
        "tensors": [
            {"key": key} | plain(one) | {"health": plain(health.get(key))}
            for key, one in checkpoint.tensors.items()
            if key in chosen
        ],
    }


def _chosen(checkpoint: Checkpoint, patterns: tuple[str, ...]) -> set[str]:
    if not patterns:
        return set(checkpoint.tensors)
    chosen: set[str] = set()
    for pattern in patterns:
        found = checkpoint.matching(pattern)
        if not found:
            raise MissingKey(f"no tensor matches {pattern!r}; omit --keys to list all tensors", keys=(pattern,))
        chosen.update(found)
    return chosen


def _text(result: dict[str, Any], with_tensors: bool) -> None:
    stats = result["stats"]
    saved = f"{size(stats['bytes_total'])}, {size(stats['bytes_written'])} written; {stats['seconds']:.2f} s"
    notes = [*result["tags"], *states(result, "ephemeral", "forgotten")]
    notes += [] if result["healthy"] is None else ["healthy" if result["healthy"] else "unhealthy"]
    attachments = ", ".join(f"{item['name']} ({size(item['bytes'])})" for item in result["attachments"])
    rows = [
        ("id", result["id"]),
        ("name", f"{result['run']}@{result['step']}"),
        (
            "created",
            f"{moment(result['created_at'])} UTC, by {result['who']}, with casckpt {result['versions']['casckpt']}",
        ),
        ("saved", saved),
        *coded(stats),
        ("notes", ", ".join(notes)),
        ("signers", _signers(result["signers"])),
        ("health", _health(result["health"], result["tensors"])),
        ("metrics", ", ".join(f"{name} {value}" for name, value in result["metrics"].items())),
        ("metadata", json.dumps(result["metadata"], ensure_ascii=False) if result["metadata"] else ""),
        ("thinned", _thinned(result["dropped"])),
        ("lineage", lineage_text(result["lineage"])),
        ("parent", result["parent"] or ""),
        ("ranks", str(result["world_size"])),
        ("files", attachments),
        ("objects", _few(result["objects"])),
        ("pickled", _few(result["pickled"])),
        ("differing", _few(result["differing"])),
        ("tensors", count(len(result["tensors"]), "tensor")),
    ]
    facts([(title, value) for title, value in rows if value])
    if with_tensors and result["tensors"]:
        say()
        looked = any(item["health"] for item in result["tensors"])
        table((*_COLUMNS, *(_HEALTH if looked else ())), (_cells(item, looked) for item in result["tensors"]))
    elif result["tensors"]:
        say("list all of them with --tensors, or some of them with --keys PATTERN")


def _signers(keys: list[str]) -> str:
    return (
        f"{', '.join(key[:12] for key in keys)}; not checked here: use `casckpt verify --require-signature`"
        if keys
        else ""
    )


def _thinned(dropped: dict[str, Any] | None) -> str:
    if dropped is None:
        return ""
    return f"{count(dropped['entries'], 'tensor')}, {size(dropped['bytes'])}, by {dropped['rule']}"


def _few(keys: list[str]) -> str:
    """Return all keys if there are only a few. Otherwise, return the number of keys with each first element."""
    return ", ".join(shortened(keys if len(keys) <= _FEW_VALUES else list(summed(keys))))


def _health(health: dict[str, Any] | None, tensors: list[dict[str, Any]]) -> str:
    """Format the health of all tensors, and the number of unchecked ones. Return "" if the save did not check them."""
    if health is None:
        return ""
    unknown = sum(one["health"] is None and one["dtype"] != "bool" for one in tensors)
    unlooked = f"; {count(unknown, 'tensor')} not checked" if unknown else ""
    summary = ", ".join(unusual(health)) or "no NaN or infinite elements"
    return f"{summary}{' in ' * bool(health['keys'])}{_few(health['keys'])}{unlooked}"


def _cells(one: dict[str, Any], looked: bool) -> tuple[str, ...]:
    cells = one["key"], one["dtype"], "x".join(map(str, one["shape"])) or "scalar", size(one["bytes"])
    if not looked:
        return cells
    health = one["health"]
    return (*cells, *(("", "") if health is None else (f"{health['largest']:.4g}", ", ".join(unusual(health)))))


@store_command("diff")
@click.argument("old")
@click.argument("new")
def diff(session: Session, old: str, new: str) -> None:
    """Show which tensors differ between two checkpoints.

    Compares the manifests cell by cell, and does not read any tensor.
    """
    session.give(differences(session.store, old, new), difference_text)


def differences(store: Store, old: str, new: str) -> dict[str, Any]:
    """Return the differences as plain data."""
    one, other = store.get(old), store.get(new)
    found = store.diff(one, other)
    result = {"old": brief(one), "new": brief(other), "changed": list(found.changed)}
    if one.holds_files and other.holds_files:
        from casckpt.frontends.files.comparing import file_changes

        result["files"] = file_changes(one, other)._asdict()
    return result | {"bytes_changed": found.bytes_changed, **plain(found)}


def difference_text(result: dict[str, Any]) -> None:
    """Print the differences, one line for each differing tensor."""
    say(f"{name(result['old'])} -> {name(result['new'])}")
    for sign, title in (("+", "added"), ("-", "removed"), ("~", "changed")):
        say_all(f"  {sign} file {printable(path)}" for path in shortened(result.get("files", {}).get(title, [])))
    for sign, title in (("+", "added"), ("-", "removed")):
        say_all(f"  {sign} {printable(key)}" for key in shortened(result[title]))
    lines = [f"{one['key']}  {one['what']}, {size(one['bytes'])}" for one in result["changes"]]
    say_all(f"  ~ {printable(line)}" for line in shortened(lines))
    for title, nbytes in (
        ("added", "bytes_added"), ("removed", "bytes_removed"), ("changed", "bytes_changed"),
        ("unchanged", "bytes_unchanged"),
    ):  # fmt: skip
        say(f"{title:<10} {count(len(result[title]), 'tensor'):>14}  {size(result[nbytes]):>10}")
