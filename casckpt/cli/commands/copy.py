"""``casckpt copy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from casckpt.base.groups import grouped
from casckpt.cli.describe import brief, plain
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, say_all, say_some, shortened, size
from casckpt.cli.types import SETTING, STORE
from casckpt.errors import Damaged

if TYPE_CHECKING:
    from casckpt.store.types import CopyResult


@store_command("copy")
@click.argument("destination", metavar="DST", type=STORE)
@click.argument("refs", nargs=-1, metavar="[REF]...")
@click.option("--run", metavar="PATTERN", help="Copy only checkpoints of matching runs.")
@click.option(
    "--tags/--no-tags",
    default=None,
    help="Also set these checkpoints' tags in DST.  [default: if neither REF nor --run is given, the tags that DST "
    "does not have]",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="The number of files to copy in parallel.  [default: 4; 16 for a bucket]"
)
@click.option("--compress", type=click.Choice(["off", "always"]), help="always: encode floats to save space.")
@click.option("--dry-run", is_flag=True, help="Show what would be copied, without copying anything.")
@click.option("--dst-option", "dst_options", type=SETTING, multiple=True, help="Like --storage-option, for DST.")
def command(session: Session, destination: str, refs: tuple[str, ...], *, dst_options: Any, **options: Any) -> int:
    """Copy checkpoints to another store.

    Copies all visible checkpoints, or the ones that you name, but transfers only the bytes that DST lacks. The copies
    keep their ids, times and order. The command verifies every byte, and creates DST if necessary. If it is killed,
    the next copy continues where it stopped. Copies that run at the same time share the work. Checkpoints that are
    forgotten in DST remain forgotten unless you name them. The exit status is 4 if damaged data was not copied, and 5
    if DST has a different checkpoint under the same run and step.
    """
    from casckpt.base.text import is_url
    from casckpt.store.opening import open as open_store

    if session.storage_options and not is_url(session.url):
        raise click.UsageError("--storage-option applies to STORE, which is a local folder; use --dst-option for DST")
    target = open_store(
        destination, storage_options=dict(dst_options), cache_dir=session.cache_dir, single_writer=session.single_writer
    )
    with progress_bar("copying") as done:
        result = session.store.copy_to(target, *refs, progress=done, check=False, **options)
    session.give(_described(result), text)
    found = [one.error.exit_status for one in result.failed] + [Damaged.exit_status for _ in result.records]
    return max(found, key=(0, 1, 5, 4).index, default=0)


def _described(result: CopyResult) -> dict[str, Any]:
    failed = [
        brief(one.commit) | {"kind": one.error.kind, "blob": one.error.blob, "why": str(one.error)}
        for one in result.failed
    ]
    found: dict[str, Any] = plain(result)
    return found | {"failed": failed, "blobs_copied": found.pop("blobs"), "bytes_copied": found.pop("nbytes")}


def text(result: dict[str, Any]) -> None:
    """Print which checkpoints were copied and which were not."""
    copied, restored = ("would copy", "would restore") if result["dry_run"] else ("copied", "restored")
    for what, ones in ((copied, result["copied"]), (restored, result["restored"])):
        say_some([f"{what} {name(one)}" for one in ones])
    say_some([f"still forgotten in DST: {name(one)}" for one in result["left"]], 5)
    # one line for each damaged blob
    for ones in grouped(result["failed"], lambda one: one["blob"] or one["why"]).values():
        say(f"not copied: {', '.join(shortened([name(one) for one in ones], 5))}: {printable(ones[0]['why'])}")
    say_all(
        f"not copied: the checkpoint of {printable(one['key'])}: {printable(one['why'])}" for one in result["records"]
    )
    if result["tags"]:
        done = "would set" if result["dry_run"] else "set"
        say(f"{done} the tags {printable(', '.join(shortened(result['tags'])))}")
    say_some([f"left the tag {printable(name)}: {printable(why)}" for name, why in result["tags_left"].items()])
    done = count(len(result["copied"]), "checkpoint")
    say(f"{copied} {done}, {size(result['bytes_copied'])}; {count(len(result['present']), 'checkpoint')} already there")
