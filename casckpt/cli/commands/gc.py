"""``casckpt gc``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.describe import doubt
from casckpt.cli.progress import progress
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, moment, name, printable, say, shortened, size
from casckpt.cli.types import DURATION

if TYPE_CHECKING:
    from casckpt.repository.retiring import Waiting


@store_command("gc")
@click.option("--run", help="Forget and purge only checkpoints of this run.")
@click.option("--keep-last", type=click.IntRange(min=0), metavar="N", help="Keep the N newest of each run.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep those whose step is a multiple of N.")
@click.option("--keep-within", type=DURATION, help="Keep those saved at most so long ago (12h, 7d).")
@click.option("--min-age", type=DURATION, help="Purge what was forgotten so long ago.  [default: 0; 24h in a bucket]")
@click.option("--wait", type=DURATION, default="60s", show_default=True, help="Wait so long for saves in progress.")
@click.option(
    "--revoke-after", type=DURATION, help="Give up on saves without a sign of life for so long.  [default: 1h]"
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
def command(session: Session, dry_run: bool, **options: Any) -> None:
    """Forget by rules, delete what nothing needs.

    Safe while others save. A checkpoint that any --keep rule keeps is kept; without a rule none is forgotten. The
    newest of each run, and tagged ones, always stay. What has to wait is left to the next gc.
    """
    if options["run"] is not None:
        doubt(session.repository, options["run"])
    with progress("deleting", None, of_bytes=False) as done:
        result = session.store.gc(dry_run=dry_run, progress=done, tell=_Teller(), **options)
    session.give(result.to_json(), text)


class _Teller:
    """Says what is waited for, each thing once."""

    def __init__(self) -> None:
        self.told: set[str | None] = set()

    def __call__(self, waiting: Sequence[Waiting]) -> None:
        for one in waiting:
            if one.txid not in self.told:
                self.told.add(one.txid)
                say(f"waiting for {_waits(one.to_json())}", err=True)


def text(result: dict[str, Any]) -> None:
    """What was done, or would be."""
    forget, purge, delete = ("would forget", "would purge", "would delete")
    if not result["dry_run"]:
        forget, purge, delete = ("forgot", "purged", "deleted")
    purged = {one["id"] for one in result["purged"]}
    only_forgotten = [one for one in result["forgotten"] if one["id"] not in purged]
    for what, ones in ((forget, only_forgotten), (purge, result["purged"])):
        for line in shortened([f"{what} {name(one)}" for one in ones]):
            say(line)
    for txid in result["revoked"]:
        say(f"gave up on save {txid}")
    say(
        f"{delete} {count(result['deleted_blobs'], 'blob')}, {size(result['deleted_bytes'])}; "
        f"{count(result['kept_blobs'], 'blob')}, {size(result['kept_bytes'])} stay"
    )
    for line in shortened([f"left for later: {_waits(one)}" for one in result["waiting"]]):
        say(line)
    if result["foreign"]:
        say(f"not ours, left alone: {printable(', '.join(shortened(result['foreign'], 5)))}")


def _waits(one: dict[str, Any]) -> str:
    if one["reason"] == "young":
        return f"{name(one)}, until {moment(one['until'])} UTC"
    if one["reason"] == "unmirrored":
        return f"{name(one)}, not safe in the mirror yet"
    if one["reason"] == "tagged":
        return f"{name(one)}, forgotten but tagged {', '.join(one['tags'])}"
    run = f"{one['run']}@{one['step']}" if "run" in one else f"step {one['step']}"
    process = f" by process {one['pid']} on {one['host']}" if "pid" in one else ""
    return printable(f"the save of {run}{process}, since {moment(one['since'])} UTC ({one['txid']})")
