"""``casckpt repair``."""

from __future__ import annotations

from typing import Any

import click

from casckpt.cli.commands.verify import about_records, say_damage
from casckpt.cli.describe import plain
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, say, say_all, say_some
from casckpt.errors import Damaged


@store_command("repair")
@click.option(
    "--from", "sources", multiple=True, metavar="STORE", help="Another store to take bytes from. May be repeated."
)
def command(session: Session, sources: tuple[str, ...]) -> int:
    """Repair damaged blobs and manifests.

    Takes the bytes from equal blobs and cells of this store and of others. If a blob cannot be rebuilt, the checkpoint
    is rewritten without it, under the same id. Damaged records of commits and tags are only reported: put those files
    back from a copy. Exit status 4 if something cannot be repaired.
    """
    from casckpt.store.opening import open as open_store

    others = [open_store(url, storage_options=session.storage_options, cache_dir=session.cache_dir) for url in sources]
    with progress_bar("repairing") as done:
        result = session.store.repair(*others, progress=done)
    session.give(plain(result), text)
    return Damaged.exit_status if result.is_damaged else 0


def text(result: dict[str, Any]) -> None:
    """Say what is right again, and what is lost."""
    say_all(f"repaired blob {blob}" for blob in result["blobs"])
    say_all(f"repaired manifest {id}" for id in result["manifests"])
    say_some([f"rewrote {name(one)}" for one in result["rewritten"]])
    say_damage("not repaired:", result["lost"], result["lost_manifests"], result["records"])
    done = len(result["blobs"]) + len(result["manifests"]) + len(result["rewritten"])
    say(f"repaired {count(done, 'object')}")
    if result["lost"] or result["lost_manifests"]:
        say(
            "give another copy with --from, or give those up with `casckpt forget`: a gc deletes them a day later, or "
            "at once with `--run RUN --min-age 0`, which purges whatever else of that run is forgotten, too"
        )
    say_all(about_records(result["records"]))
