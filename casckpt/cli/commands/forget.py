"""``casckpt forget``, and ``casckpt restore``, which undoes a forget."""

from __future__ import annotations

from typing import Any

import click

from casckpt.cli.describe import brief, plain
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, printable, say_all


@store_command("forget")
@click.argument("refs", nargs=-1, required=True, metavar="REF...")
@click.option("--tagged", is_flag=True, help="Also forget tagged checkpoints.")
@click.option("--dry-run", is_flag=True, help="Show which checkpoints would be forgotten.")
def command(session: Session, refs: tuple[str, ...], tagged: bool, dry_run: bool) -> None:
    """Hide checkpoints, so that gc can delete them.

    REF may be a range of steps: RUN@100..500, RUN@501.., RUN@..500, or RUN@.. for all steps. `casckpt restore` undoes
    this until a gc purges the checkpoints. If one of them has a tag, none are forgotten.
    """
    forgotten = session.store.forget(*refs, tagged=tagged, dry_run=dry_run)
    session.give({"forgotten": list(map(brief, forgotten)), "dry_run": dry_run}, _text)


def _text(result: dict[str, Any]) -> None:
    done = "would forget" if result["dry_run"] else "forgot"
    say_all(f"{done} {name(one)}" for one in result["forgotten"])


@store_command("restore")
@click.argument("refs", nargs=-1, required=True, metavar="REF...")
@click.option("--whole", is_flag=True, help="Bring back the tensors that `casckpt thin` dropped.")
@click.option("--dry-run", is_flag=True, help="Show which checkpoints would be restored.")
def restore(session: Session, refs: tuple[str, ...], *, whole: bool, dry_run: bool) -> int:
    """Make forgotten checkpoints visible again.

    Name them by id (see `casckpt list --all`), by RUN@STEP, or by ranges of steps. Ranges skip visible checkpoints. The
    exit status is 3 for a purged checkpoint, and 5 if a different checkpoint is visible under the same run and step. If
    one of them cannot be restored, none are.
    """
    result = session.store.restore_many(*refs, whole=whole, dry_run=dry_run, check=False)
    failed = [brief(one.commit) | {"kind": one.error.kind, "why": str(one.error)} for one in result.failed]
    session.give(plain(result) | {"failed": failed}, _restored_text)
    return max((one.error.exit_status for one in result.failed), key=(0, 1, 3, 5, 4).index, default=0)


def _restored_text(result: dict[str, Any]) -> None:
    done = "would restore" if result["dry_run"] else "restored"
    say_all(f"{done} {name(one)}" for one in result["restored"])
    say_all(f"already visible: {name(one)}" for one in result["visible"])
    say_all(f"not restored: {name(one)}: {printable(one['why'])}" for one in result["failed"])
    say_all(f"not restored: {name(one)}" for one in result["left"])
