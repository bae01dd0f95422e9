"""``casckpt status``, for people and for monitoring."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from casckpt.cli.describe import plain
from casckpt.cli.failures import FAILED
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import Column, count, facts, moment, name, printable, say, say_some, size, table
from casckpt.cli.types import DURATION, SIZE
from casckpt.errors import Damaged


@store_command("status")
@click.option("--max-save-age", type=DURATION, help="Exit with 1 if a save in progress is older.")
@click.option("--max-gc-age", type=DURATION, help="Exit with 1 if no gc has finished for this long.")
@click.option("--max-mirror-age", type=DURATION, help="Exit with 1 if the mirror lacks an older checkpoint.")
@click.option("--min-free", type=SIZE, help="Exit with 1 if the disk has less free space.")
def command(session: Session, min_free: int | None, **most: timedelta | None) -> int:
    """Show what needs attention in a store.

    Shows the last gc that finished, saves in progress, damage, what the mirror lacks, the oldest tag, and the bytes on
    the disk, by the run and the user whose save wrote them. Reads no blobs: `casckpt verify` finds damaged bytes, and
    marks them for this command. The exit status is 4 if anything is damaged, and otherwise 1 if a limit is exceeded.
    """
    status, exceeded = session.store.status(), []
    began = min((one.since for one in status.saves), default=None)
    since = {"save": began, "gc": status.gc and status.gc.at, "mirror": status.unmirrored_since}
    ages: dict[str, timedelta | None] = {}
    for what, at in since.items():
        age = ages[what] = at if at is None else timedelta(seconds=int((status.at - at).total_seconds()))
        limit = most[f"max_{what}_age"]
        if limit is not None and (what == "gc" if age is None else age > limit):
            exceeded.append(f"{what}: {'never' if age is None else age}, and the limit is {limit}")
    if min_free is not None and status.bytes_free is not None and status.bytes_free < min_free:
        exceeded.append(f"free: {size(status.bytes_free)}, and the limit is {size(min_free)}")
    session.give(plain(status) | {"ages": plain(ages), "exceeded": exceeded}, text)
    return Damaged.exit_status if status.damaged else FAILED if exceeded else 0


def text(found: dict[str, Any]) -> None:
    """Print the facts, and a line for each save in progress, damaged file, and exceeded limit."""
    gc, tag, lacks, free = (found[key] for key in ("gc", "oldest_tag", "unmirrored", "bytes_free"))
    on = name(tag["checkpoint"]) if tag and tag["checkpoint"] else "a lost checkpoint"
    left = "left: checkpoints {waiting}, saves in progress {opened}, refused files {refused}"
    lag = f"lacks {count(len(lacks), 'checkpoint')} since {moment(found['unmirrored_since'])} UTC" if lacks else "whole"
    mirror = [found["mirror"] or "none", found["mirror_problem"], lag if found["mirror"] else ""]
    facts([
        ("last gc", f"{moment(gc['at'])} UTC, {gc['who']}; {left.format(**gc)}" if gc else "none has finished"),
        ("mirror", ", ".join(filter(None, mirror))),
        ("oldest tag", f"{tag['name']} on {on}, {moment(tag['set_at'])} UTC, {tag['holder']}" if tag else "none"),
        ("on disk", size(found["bytes_on_disk"]) + ("" if free is None else f", {size(free)} free")),
    ])  # fmt: skip
    for title in ("run", "user"):
        rows = ((one or "(none)", size(nbytes)) for one, nbytes in found[f"by_{title}"].items())
        table((Column(title.upper()), Column("ON DISK", "right")), rows)
    save = "saving: {run}@{step}, since {since} UTC, on {host} ({txid})"
    say_some([printable(save.format(**one | {"since": moment(one["since"])})) for one in found["saves"]])
    say_some([printable(f"damaged: {one['key']}: {one['why']}") for one in found["damaged"]])
    say_some([f"exceeded: {line}" for line in found["exceeded"]])
    if not (found["damaged"] or found["exceeded"]):
        say("no damage is known, and no limit is exceeded")
