"""``casckpt diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.commands.show import health_cells
from casckpt.cli.completion import REF
from casckpt.cli.describe import brief, plain
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import Column, count, name, printable, say, say_all, shortened, size, table

if TYPE_CHECKING:
    from casckpt.store.store import Store

_COLUMNS = (
    Column("TENSOR"),
    Column("LARGEST OLD", "right", fixed=True),
    Column("NEW", "right", fixed=True),
    Column("UNUSUAL IN IT", fixed=True),
)


@store_command("diff")
@click.argument("old", type=REF)
@click.argument("new", type=REF, required=False)
@click.option("--values", is_flag=True, help="Also show largest values and NaN, where the saves recorded them.")
def command(session: Session, old: str, new: str | None, *, values: bool) -> None:
    """Show which tensors differ between two checkpoints.

    Compares the manifests, cell by cell, and reads no tensor. Without NEW, OLD is compared with its parent: the newest
    checkpoint of the run when it was saved.
    """
    if new is None:
        old, new = _parent(session.store, old), old
    found = differences(session.store, old, new)
    if values:
        found["values"] = _values(session.store, old, new, found)
    session.give(found, text)


def _parent(store: Store, ref: str) -> str:
    """The id of what ``ref`` was saved after. Raises NotFound."""
    from casckpt.errors import NotFound

    checkpoint = store.get(ref)
    parent = checkpoint.commit.committed.parent
    if parent is None:
        raise NotFound(f"{ref} has no parent: it was the first of its run; name another checkpoint to compare it with")
    if parent not in store:
        raise NotFound(f"the parent of {ref}, {parent[:12]}, is gone; name another checkpoint to compare it with")
    return parent


def differences(store: Store, old: str, new: str) -> dict[str, Any]:
    """Give what differs, as plain data."""
    one, other = store.get(old), store.get(new)
    found = store.diff(one, other)
    result = {"old": brief(one), "new": brief(other), "changed": list(found.changed)}
    return result | {"bytes_changed": found.bytes_changed, **plain(found)}


def _values(store: Store, old: str, new: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """What the saves of two checkpoints have found in each tensor that is not the same in both; null: it is unknown."""
    one, other = store.get(old).health or {}, store.get(new).health or {}
    keys = (*found["removed"], *found["added"], *found["changed"])
    return [{"key": key, "old": plain(one.get(key)), "new": plain(other.get(key))} for key in keys]


def text(result: dict[str, Any]) -> None:
    """Say what differs, a line for each tensor that is not the same."""
    say(f"{name(result['old'])} -> {name(result['new'])}")
    for sign, title in (("+", "added"), ("-", "removed")):
        say_all(f"  {sign} {printable(key)}" for key in shortened(result[title]))
    lines = [f"{one['key']}  {one['what']}, {size(one['bytes'])}" for one in result["changes"]]
    say_all(f"  ~ {printable(line)}" for line in shortened(lines))
    for title, nbytes in (
        ("added", "bytes_added"), ("removed", "bytes_removed"), ("changed", "bytes_changed"),
        ("unchanged", "bytes_unchanged"),
    ):  # fmt: skip
        say(f"{title:<10} {count(len(result[title]), 'tensor'):>14}  {size(result[nbytes]):>10}")
    if result.get("values"):
        say()
        table(_COLUMNS, map(_cells, result["values"]))


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    (was, _), (largest, what) = health_cells(one["old"]), health_cells(one["new"])
    return one["key"], was, largest, what
