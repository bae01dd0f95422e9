"""``casckpt tag``."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import click

from casckpt.cli.describe import brief, plain
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import Column, moment, name, printable, say, table
from casckpt.cli.types import DURATION
from casckpt.errors import NotFound

_COLUMNS = (
    Column("NAME"),
    Column("CHECKPOINT"),
    Column("UNTIL (UTC)"),
    Column("HOLDER"),
)

log = logging.getLogger(__name__)


@store_command("tag")
@click.argument("tag", required=False, metavar="[NAME]")
@click.argument("ref", required=False)
@click.option("--delete", metavar="NAME", help="Delete this tag, but not its checkpoint.")
@click.option("--expires", type=DURATION, help="Make the tag expire after this time (12h, 7d).")
def command(session: Session, tag: str | None, ref: str | None, delete: str | None, expires: timedelta | None) -> None:
    """Tag a checkpoint, or list the tags.

    gc never forgets a tagged checkpoint. In other commands, use tag:NAME as REF. If the tag already exists, the
    command moves it. The list includes readers' leases.
    """
    if expires is not None and ref is None:
        raise click.UsageError("--expires requires a tag to set: pass NAME and REF")
    if delete is not None:
        if tag is not None:
            raise click.UsageError("--delete accepts a single name: omit all other arguments")
        session.store.untag(delete)
        session.give({"deleted": delete}, lambda result: say(f"deleted tag {printable(result['deleted'])}"))
    elif tag is not None and ref is not None:
        session.store.tag(tag, ref, expires=expires)
        session.give(_rows(session, tag)[0], lambda result: _table([result]))
    else:
        session.give(_rows(session, tag), _table)


def _rows(session: Session, only: str | None = None) -> list[dict[str, Any]]:
    """Return all tags, or only the one named ``only``. Raises NotFound."""
    listing = session.store.listing()
    for tag_name in listing.damaged_tags:
        log.warning("cannot read the record of tag %s: set the tag again, or delete it", tag_name)
    for tag_name in listing.lost_tags:
        log.warning(
            "tag %s names a checkpoint with an unreadable record (run `casckpt verify` for details), or one that this "
            "store does not have: set the tag again, or delete it",
            tag_name,
        )
    rows = [
        {"name": tag_name} | brief(tag.checkpoint.commit) | {"expires": plain(tag.expires), "holder": tag.holder}
        for tag_name, tag in listing.tags.items()
        if only in (None, tag_name)
    ]
    if only is not None and not rows:
        raise NotFound(f"there is no tag {only!r}; set it with `casckpt tag STORE {only} REF`")
    return rows


def _table(tags: list[dict[str, Any]]) -> None:
    if tags:
        table(_COLUMNS, map(_cells, tags))
    else:
        say("no tags")


def _cells(tag: dict[str, Any]) -> tuple[str, ...]:
    return tag["name"], name(tag), moment(tag["expires"]) if tag["expires"] else "", tag["holder"]
