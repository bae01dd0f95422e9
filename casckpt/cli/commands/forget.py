"""``casckpt forget``, and ``casckpt restore``, which undoes it."""

from __future__ import annotations

from typing import Any

import click

from casckpt.cli.completion import FORGOTTEN, REF
from casckpt.cli.describe import brief
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, say


@store_command("forget")
@click.argument("refs", type=REF, nargs=-1, required=True, metavar="REF...")
@click.option("--tagged", is_flag=True, help="Also those that a tag names.")
@click.option("--dry-run", is_flag=True, help="Only show which.")
def command(session: Session, refs: tuple[str, ...], tagged: bool, dry_run: bool) -> None:
    """Take checkpoints out of sight.

    Name them, or use RUN@501.. and RUN@100..500 for ranges of steps. `casckpt restore` brings them back, until a gc
    purges them. If one of them is tagged, nothing is forgotten.
    """
    forgotten = session.store.forget(*refs, tagged=tagged, dry_run=dry_run)
    session.give({"forgotten": list(map(brief, forgotten)), "dry_run": dry_run}, _text)


def _text(result: dict[str, Any]) -> None:
    for one in result["forgotten"]:
        say(f"{'would forget' if result['dry_run'] else 'forgot'} {name(one)}")


@store_command("restore")
@click.argument("refs", type=FORGOTTEN, nargs=-1, required=True, metavar="ID...")
@click.option("--whole", is_flag=True, help="Bring back what `casckpt thin` left out of them.")
def restore(session: Session, refs: tuple[str, ...], *, whole: bool) -> None:
    """Make forgotten checkpoints visible again.

    Name them by their ids (`casckpt list --all`). Those that were purged are not found. It is a conflict if another
    checkpoint is visible under the same run and step.
    """
    found = [session.store.get(ref) for ref in refs]
    restored = [session.store.restore(one, whole=whole) for one in found]
    session.give({"restored": list(map(brief, restored))}, _restored_text)


def _restored_text(result: dict[str, Any]) -> None:
    for one in result["restored"]:
        say(f"restored {name(one)}")
