"""``casckpt tag``."""

from __future__ import annotations

import logging
from typing import Any

import click

from casckpt.cli.completion import REF
from casckpt.cli.describe import brief
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, printable, say
from casckpt.errors import NotFound

log = logging.getLogger(__name__)


@store_command("tag")
@click.argument("tag", required=False, metavar="[NAME]")
@click.argument("ref", type=REF, required=False)
@click.option("--delete", metavar="NAME", help="Delete this tag. Its checkpoint stays.")
def command(session: Session, tag: str | None, ref: str | None, delete: str | None) -> None:
    """Name a checkpoint, or list the names.

    A tagged checkpoint is kept by every policy; tag:NAME is a REF. A tag moves when it is set again.
    """
    if delete is not None:
        if tag is not None:
            raise click.UsageError("--delete takes the name; give nothing behind it")
        session.store.untag(delete)
        session.give({"deleted": delete}, lambda result: say(f"deleted tag {printable(result['deleted'])}"))
    elif tag is not None and ref is not None:
        checkpoint = session.store.get(ref)
        session.store.tag(tag, checkpoint)
        session.give({"name": tag} | brief(checkpoint), lambda result: _text([result]))
    else:
        session.give(_tags(session, tag), _text)


def _tags(session: Session, only: str | None) -> list[dict[str, Any]]:
    from casckpt.repository.tags import list_tags

    session.repository.check_exists()  # no store is not the same as no tags
    found = session.store.tags()
    for tag in list_tags(session.repository).tags.keys() - found.keys():
        log.warning("tag %s names a checkpoint whose record cannot be read; `casckpt verify` says more", tag)
    if only is not None and only not in found:
        raise NotFound(f"there is no tag {only!r}; `casckpt tag STORE {only} REF` makes it")
    return [{"name": tag} | brief(one) for tag, one in found.items() if only in (None, tag)]


def _text(tags: list[dict[str, Any]]) -> None:
    width = max((len(tag["name"]) for tag in tags), default=0)
    for tag in tags:
        say(f"{printable(tag['name']):<{width}}  {name(tag)}")
    if not tags:
        say("no tags")
