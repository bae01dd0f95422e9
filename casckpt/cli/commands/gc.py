"""``casckpt gc``, and ``casckpt thin``, which drops tensors from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from casckpt.cli.describe import doubt, plain
from casckpt.cli.failures import FAILED
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, moment, name, printable, say, say_all, say_some, shortened, size
from casckpt.cli.types import DURATION, keep_options

if TYPE_CHECKING:
    from casckpt.store.types import Deferred


@store_command("thin")
@click.argument("refs", nargs=-1, metavar="[REF...]")
@click.option(
    "--drop",
    multiple=True,
    required=True,
    metavar="PATTERN",
    help="Drop the tensors whose key matches. May be repeated.",
)
@click.option("--run", metavar="PATTERN", help="Thin only checkpoints of matching runs.")
@keep_options
@click.option("--tagged", is_flag=True, help="Also thin tagged checkpoints.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
def thin(session: Session, refs: tuple[str, ...], **options: Any) -> int:
    """Drop tensors from checkpoints, and keep the rest.

    Thins the checkpoints that you name, or all that no --keep rule keeps whole. Tagged checkpoints and the newest one
    of each run remain whole. A thinned checkpoint keeps its id, name and tags. `casckpt restore --whole` can bring the
    tensors back until a gc purges the old locations, by default a day later. That gc also frees the space.
    """
    unknown = doubt(session.store, options["run"])
    session.give(plain(session.store.thin(*refs, **options)), thinned_text)
    return FAILED if unknown else 0


def thinned_text(result: dict[str, Any]) -> None:
    """Print the thinned checkpoints, and how many bytes a gc will free."""
    done = "would thin" if result["dry_run"] else "thinned"
    say_some([f"{done} {name(one)}" for one in result["thinned"]])
    left = f"{count(result['entries'], 'tensor')} of {size(result['nbytes'])} dropped from "
    say(f"{left}{count(len(result['thinned']), 'checkpoint')}")
    if result["thinned"]:
        when = (
            f"after {moment(result['until'])} UTC; --min-age 0 frees them immediately, but purges all forgotten "
            "checkpoints (not if the settings have a min_age)"
            if result["until"]
            else "now"
        )
        say(f"{size(result['freed_bytes'])} in blobs will be freed by a gc {when}")
    if result["shared_bytes"]:
        say(f"{size(result['shared_bytes'])} more will be freed once other checkpoints no longer need them")


_OLD: Final = "the old locations of "  # of a rewritten checkpoint


@store_command("gc")
@click.option("--run", multiple=True, metavar="PATTERN", help="Only runs that match. May be repeated.")
@keep_options
@click.option(
    "--min-age",
    type=DURATION,
    help="Purge checkpoints that were forgotten at least this long ago. Not less than the setting.  [default: 24h]",
)
@click.option(
    "--wait", type=DURATION, default="60s", show_default=True, help="Wait up to this long for saves in progress."
)
@click.option(
    "--revoke-after", type=DURATION, help="Revoke saves that have shown no sign of life for this long.  [default: 1h]"
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
def command(session: Session, dry_run: bool, run: tuple[str, ...], **options: Any) -> int:
    """Forget checkpoints by rules, and delete unused files.

    gc can run during saves and loads. It keeps a checkpoint if any --keep rule keeps it. Without a rule, gc forgets
    nothing. It always keeps tagged checkpoints and the newest one of each run. You can restore a forgotten checkpoint
    for a day, or for --min-age. The first gc after that deletes it. If a save in progress may use a file, gc leaves the
    file for the next gc. The exit status is 1 if another user's permissions keep gc from a file, or if no run matches
    a --run; it does the rest.
    """
    if any(pattern.startswith("-") for pattern in run):
        raise click.UsageError(f"the name of a run does not begin with '-': {', '.join(run)}")
    unknown = doubt(session.store, *run)
    with progress_bar("deleting", of_bytes=False) as done:
        options |= {"run": run or None, "progress": done, "tell": _WaitReport()}
        result = session.store.gc(dry_run=dry_run, **options)
    session.give(plain(result) | {"waiting": list(map(_known, result.waiting)), "unmatched": unknown}, text)
    return FAILED if result.refused or unknown else 0


def _known(one: Deferred) -> dict[str, Any]:
    """Convert a deferred checkpoint or save to plain data. Omit fields that are unknown."""
    return {name: value for name, value in plain(one).items() if value not in (None, [])}


class _WaitReport:
    """Prints each transaction that gc waits for, but only once."""

    def __init__(self) -> None:
        self.reported: set[str | None] = set()

    def __call__(self, waiting: Sequence[Deferred]) -> None:
        for one in waiting:
            if one.txid not in self.reported:
                self.reported.add(one.txid)
                say(f"waiting for {_waits(_known(one))}", err=True)


def text(result: dict[str, Any]) -> None:
    """Print what gc did or would do."""
    forget, restore, purge, delete = ("would forget", "would restore", "would purge", "would delete")
    if not result["dry_run"]:
        forget, restore, purge, delete = ("forgot", "restored", "purged", "deleted")
    purged = {item["id"] for item in result["purged"]}
    forgotten = {item["id"]: item for item in result["forgotten"] if item["id"] not in purged}
    young = {item["id"]: item for item in result["waiting"] if item["reason"] == "young"}
    say_some([f"{forget} {_waits(young.get(id, item))}" for id, item in forgotten.items()])
    say_some([f"{restore} {name(item)}, which is tagged" for item in result["restored"]])
    say_some(_once(f"{purge} {_name(item)}" for item in result["purged"]))
    say_all(f"gave up on save {txid}" for txid in result["revoked"])
    _say_kept(result["kept"])
    _say_space(delete, result)
    later = [item for item in result["waiting"] if item.get("id") not in forgotten]
    say_some(_once(f"left for later: {_waits(item)}" for item in later))
    say_some([f"refused: {printable(one['why'])} (owner: {one['owner'] or 'unknown'})" for one in result["refused"]])
    if result["foreign"]:
        say(f"kept unknown files: {printable(', '.join(shortened(result['foreign'], 5)))}")


def _say_kept(kept: dict[str, list[str]]) -> None:
    """Print why each checkpoint stays, and how many runs have checkpoints that stay."""
    say_some([f"kept {printable(ref)}: {', '.join(why)}" for ref, why in kept.items() if "no rule" not in why])
    runs = {ref.rpartition("@")[0] for ref in kept}
    say(f"{count(len(kept), 'checkpoint')} of {count(len(runs), 'run')} stay")


def _say_space(delete: str, result: dict[str, Any]) -> None:
    """Print how many bytes gc frees now, and how many it frees later."""
    say(
        f"{delete} {count(result['deleted_blobs'], 'blob')}, {size(result['deleted_bytes'])}; "
        f"{count(result['kept_blobs'], 'blob')}, {size(result['kept_bytes'])} remain"
    )
    if result["later_blobs"]:
        say(
            f"{count(result['later_blobs'], 'blob')}, {size(result['later_bytes'])} of these will be deleted once "
            "the forgotten checkpoints are purged; --min-age 0 deletes them immediately, and they cannot be restored "
            "(not if the settings have a min_age)"
        )


def _once(lines: Iterable[str]) -> list[str]:
    """Drop repeated lines, because a checkpoint that was rewritten several times has several old places."""
    return list(dict.fromkeys(lines))


def _name(one: dict[str, Any]) -> str:
    return f"{_OLD if 'replaced' in one else ''}{name(one)}"


def _waits(waiting: dict[str, Any]) -> str:
    if "reason" not in waiting:
        return name(waiting)
    if waiting["reason"] == "young":
        return f"{name(waiting)}, can be restored until {moment(waiting['until'])} UTC"
    if waiting["reason"] == "replaced":
        return f"{_name(waiting)}, until {moment(waiting['until'])} UTC"
    if waiting["reason"] == "unmirrored":
        return f"{_name(waiting)}, not yet safe in the mirror"
    if waiting["reason"] == "tagged":
        until = f", until {moment(waiting['until'])} UTC" if "until" in waiting else ""
        why = "" if "replaced" in waiting else "forgotten but "
        return f"{_name(waiting)}, {why}tagged {', '.join(waiting['tags'])}{until}"
    run = f"{waiting['run']}@{waiting['step']}" if "run" in waiting else f"step {waiting['step']}"
    process = f" by process {waiting['pid']} on {waiting['host']}" if "pid" in waiting else ""
    return printable(f"the save of {run}{process}, since {moment(waiting['since'])} UTC ({waiting['txid']})")
