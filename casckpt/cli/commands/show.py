"""``casckpt show``."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.completion import REF
from casckpt.cli.describe import plain, summary
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import Column, coded, count, facts, moment, say, shortened, size, summed, table, unusual
from casckpt.errors import MissingKey

if TYPE_CHECKING:
    from casckpt.store.store import Store

FEW = 20
_FEW_VALUES = 8  # in one line; they may be hundreds, as of Lightning's loops
_COLUMNS = (
    Column("TENSOR"),
    Column("DTYPE", fixed=True, spare=1),
    Column("SHAPE", fixed=True),
    Column("SIZE", "right", fixed=True),
)
_HEALTH = (Column("LARGEST", "right", fixed=True), Column("UNUSUAL", fixed=True))


@store_command("show")
@click.argument("ref", type=REF)
@click.option("--tensors", "all_tensors", is_flag=True, help="List all tensors, even if there are many.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only tensors whose key matches. May be repeated.")
@click.option("--digests", is_flag=True, help="Show the BLAKE3 of each tensor's bytes; may read them.")
def command(session: Session, ref: str, *, all_tensors: bool, keys: tuple[str, ...], digests: bool) -> None:
    """Show the content of a checkpoint.

    Also shows what its save did. With --json, all tensors are listed.
    """
    result = details(session.store, ref, keys)
    if digests:
        with progress_bar("hashing") as done:
            found = session.store.digests(result["id"], keys=keys or None, progress=done)
        result["tensors"] = [one | {"digest": found.get(one["key"])} for one in result["tensors"]]
    shown = all_tensors or bool(keys) or digests or len(result["tensors"]) <= FEW
    session.give(result, lambda result: _text(result, shown))


def details(store: Store, ref: str, patterns: tuple[str, ...] = ()) -> dict[str, Any]:
    """A checkpoint as plain data. Raises MissingKey for a pattern that matches no tensor."""
    checkpoint = store.get(ref)
    details = checkpoint.details
    chosen, health = _chosen(list(checkpoint.tensors), patterns), checkpoint.health or {}
    return summary(checkpoint) | {
        "tags": checkpoint.tags,
        "signers": checkpoint.signers,
        "metadata": checkpoint.metadata,
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


def _chosen(keys: list[str], patterns: tuple[str, ...]) -> set[str]:
    if not patterns:
        return set(keys)
    chosen: set[str] = set()
    for pattern in patterns:
        found = [key for key in keys if fnmatchcase(key, pattern)]
        if not found:
            raise MissingKey(f"no tensor matches {pattern!r}; without --keys all are listed", keys=(pattern,))
        chosen.update(found)
    return chosen


def _text(result: dict[str, Any], with_tensors: bool) -> None:
    stats = result["stats"]
    saved = f"{size(stats['bytes_total'])}, {size(stats['bytes_written'])} written; {stats['seconds']:.2f} s"
    notes = [*result["tags"], *(what for what in ("ephemeral", "forgotten") if result[what])]
    notes += [] if result["healthy"] is None else ["healthy" if result["healthy"] else "unhealthy"]
    attachments = ", ".join(f"{item['name']} ({size(item['bytes'])})" for item in result["attachments"])
    rows = [
        ("id", result["id"]),
        ("name", f"{result['run']}@{result['step']}"),
        ("created", f"{moment(result['created_at'])} UTC by casckpt {result['versions']['casckpt']}"),
        ("saved", saved),
        *coded(stats),
        ("notes", ", ".join(notes)),
        ("signers", _signers(result["signers"])),
        ("health", _health(result["health"], result["tensors"])),
        ("metrics", ", ".join(f"{name} {value}" for name, value in result["metrics"].items())),
        ("metadata", json.dumps(result["metadata"], ensure_ascii=False) if result["metadata"] else ""),
        ("thinned", _thinned(result["dropped"])),
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
        digest = (Column("BLAKE3", fixed=True),) if "digest" in result["tensors"][0] else ()
        table((*_COLUMNS, *(_HEALTH if looked else ()), *digest), (_cells(item, looked) for item in result["tensors"]))
    elif result["tensors"]:
        say("--tensors lists them, --keys PATTERN some")


def _signers(keys: list[str]) -> str:
    return f"{', '.join(key[:12] for key in keys)}; whether rightly, verify --require-signature says" if keys else ""


def _thinned(dropped: dict[str, Any] | None) -> str:
    if dropped is None:
        return ""
    return f"{count(dropped['entries'], 'tensor')}, {size(dropped['bytes'])}, by {dropped['rule']}"


def _few(keys: list[str]) -> str:
    """All of a few keys, else how many there are by their first part."""
    return ", ".join(shortened(keys if len(keys) <= _FEW_VALUES else list(summed(keys))))


def _health(health: dict[str, Any] | None, tensors: list[dict[str, Any]]) -> str:
    """What the save found in all tensors, and of how many nobody knows; nothing if it was not asked to look."""
    if health is None:
        return ""
    unknown = sum(one["health"] is None and one["dtype"] != "bool" for one in tensors)
    unlooked = f"; {count(unknown, 'tensor')} not looked at" if unknown else ""
    summary = ", ".join(unusual(health)) or "no NaN, none infinite"
    return f"{summary}{' in ' * bool(health['keys'])}{_few(health['keys'])}{unlooked}"


def _cells(one: dict[str, Any], looked: bool) -> tuple[str, ...]:
    cells = one["key"], one["dtype"], "x".join(map(str, one["shape"])) or "scalar", size(one["bytes"])
    digest = (one["digest"] or "",) if "digest" in one else ()
    return (*cells, *(health_cells(one["health"]) if looked else ()), *digest)


def health_cells(health: dict[str, Any] | None) -> tuple[str, str]:
    """The largest value of a tensor, and what is no number in it; nothing where nobody knows."""
    return ("", "") if health is None else (f"{health['largest']:.4g}", ", ".join(unusual(health)))
