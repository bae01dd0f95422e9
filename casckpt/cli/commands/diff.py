"""``casckpt diff``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, shortened, size

if TYPE_CHECKING:
    from casckpt.checkpoint.store import Store


@store_command("diff")
@click.argument("old")
@click.argument("new")
def command(session: Session, old: str, new: str) -> None:
    """Show which tensors two checkpoints differ in.

    From their manifests alone, cell by cell: no tensor is read.
    """
    session.give(differences(session.store, old, new), text)


def differences(store: Store, old: str, new: str) -> dict[str, Any]:
    """What differs, as plain data."""
    from casckpt.cli.describe import brief

    one, other = store.get(old), store.get(new)
    found = store.diff(one, other)
    return {
        "old": brief(one),
        "new": brief(other),
        "added": list(found.added),
        "removed": list(found.removed),
        "changed": list(found.changed),
        "unchanged": list(found.unchanged),
        "changes": [asdict(change) for change in found.changes],
        "bytes_added": found.bytes_added,
        "bytes_removed": found.bytes_removed,
        "bytes_changed": found.bytes_changed,
        "bytes_unchanged": found.bytes_unchanged,
    }


def text(result: dict[str, Any]) -> None:
    """What differs, a line for each tensor that is not the same."""
    say(f"{name(result['old'])} -> {name(result['new'])}")
    for sign, title in (("+", "added"), ("-", "removed")):
        for key in shortened(result[title]):
            say(f"  {sign} {printable(key)}")
    lines = [f"{one['key']}  {one['what']}, {size(one['bytes'])}" for one in result["changes"]]
    for line in shortened(lines):
        say(f"  ~ {printable(line)}")
    for title, nbytes in (
        ("added", "bytes_added"), ("removed", "bytes_removed"), ("changed", "bytes_changed"),
        ("unchanged", "bytes_unchanged"),
    ):  # fmt: skip
        say(f"{title:<10} {count(len(result[title]), 'tensor'):>14}  {size(result[nbytes]):>10}")
