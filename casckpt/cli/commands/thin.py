"""``casckpt thin``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from casckpt.cli.completion import REF, RUN
from casckpt.cli.describe import doubt, plain
from casckpt.cli.rules import keep_options
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, moment, name, say, say_some, size

if TYPE_CHECKING:
    from casckpt.plan.retention import KeepRules


@store_command("thin")
@click.argument("refs", type=REF, nargs=-1, metavar="[REF...]")
@click.option("--drop", multiple=True, required=True, metavar="PATTERN", help="Tensors to drop. May be repeated.")
@click.option("--run", type=RUN, help="Only checkpoints of this run.")
@keep_options
@click.option("--tagged", is_flag=True, help="Also thin tagged checkpoints.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
def command(
    session: Session,
    refs: tuple[str, ...],
    *,
    drop: tuple[str, ...],
    run: str | None,
    tagged: bool,
    dry_run: bool,
    **keep: Unpack[KeepRules],
) -> None:
    """Drop tensors from checkpoints, and keep the rest.

    Thins the checkpoints that you name, or all that no --keep rule keeps whole. The newest of each run, and tagged
    ones, stay whole. A thinned checkpoint keeps its id, name and tags. `casckpt restore --whole` brings the tensors
    back until a gc purges the old places, a day later by default. That gc frees the space.
    """
    if run is not None:
        doubt(session.store, run)
    session.give(plain(session.store.thin(*refs, drop=drop, run=run, tagged=tagged, dry_run=dry_run, **keep)), text)


def text(result: dict[str, Any], *, with_space: bool = True) -> None:
    """Say what was thinned, or would be; and what a gc then frees."""
    said = "would thin" if result["dry_run"] else "thinned"
    say_some([f"{said} {name(one)}" for one in result["thinned"]])
    left = f"{count(result['entries'], 'tensor')} of {size(result['nbytes'])} left out of "
    say(f"{left}{count(len(result['thinned']), 'checkpoint')}")
    if result["thinned"] and with_space:
        when = (
            f"after {moment(result['until'])} UTC; --min-age 0 does it now, and purges all that is forgotten"
            if result["until"]
            else "now"
        )
        say(f"{size(result['freed_bytes'])} in blobs are freed by a gc {when}")
    if result["shared_bytes"] and with_space:
        say(f"{size(result['shared_bytes'])} more once other checkpoints do not need them")
