"""``casckpt verify``, and ``casckpt sign``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.completion import REF
from casckpt.cli.describe import plain
from casckpt.cli.failures import FAILED
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, say_all, shortened, size
from casckpt.errors import Damaged

if TYPE_CHECKING:
    from casckpt.store.types import Mode


@store_command("verify", loads=True)
@click.argument("refs", type=REF, nargs=-1, metavar="[REF]...")
@click.option("--quick", is_flag=True, help="Check only that blobs exist, have the right size, and are not marked.")
@click.option(
    "--sample", type=click.FloatRange(0, 1, min_open=True), default=1.0, metavar="FRACTION",
    help="Check only a random part of the blobs, such as 0.1.",
)  # fmt: skip
@click.option("--decode", is_flag=True, help="Also decode encoded cells, and compare them.")
def command(session: Session, refs: tuple[str, ...], quick: bool, sample: float, decode: bool) -> int:
    """Read all bytes and compare them with their hashes.

    Reads everything that the checkpoints need, or the given ones. Marks damaged blobs, so that no save uses them;
    `casckpt repair` fixes them where it can. Exit status 4 if anything is damaged, and with --require-signature 1 if a
    checkpoint has no signature of these keys.
    """
    with progress_bar("verifying") as done:
        mode: Mode = "exists" if quick else "full"
        result = session.store.verify(*refs, mode=mode, sample=sample, decode=decode, progress=done)
    session.give(plain(result), text)
    if result.is_damaged:
        return Damaged.exit_status
    return FAILED if result.failed or result.unsigned else 0


@store_command("sign")
@click.argument("refs", type=REF, nargs=-1, required=True, metavar="REF...")
@click.option("--key", required=True, metavar="FILE", help="The private key: Ed25519, of OpenSSL or ssh-keygen.")
@click.option("--password", is_flag=True, help="Ask for the password of the key.")
def sign(session: Session, refs: tuple[str, ...], key: str, password: bool) -> None:
    """Sign checkpoints.

    Stores a signature of each checkpoint's id. It survives repair, copies and thin, and is deleted with its checkpoint.
    REF may be a range of steps. Readers can require signatures: casckpt.open(..., require_signature=KEY).
    """
    word = click.prompt("password", hide_input=True, err=True).encode() if password else None
    signed = session.store.sign(*refs, key=key, password=word)
    session.give(plain(signed), _signed)


def _signed(result: list[dict[str, Any]]) -> None:
    say_all(f"signed {name(one)}" for one in result)


def text(result: dict[str, Any]) -> None:
    """Say what was checked, and what is wrong."""
    say_damage("damaged", result["damaged"], result["manifests"], result["records"])
    say_all(f"could not read blob {one['blob']}: {printable(one['why'])}" for one in result["failed"])
    say_all(f"not signed: {name(one)}" for one in result["unsigned"])
    say_all(f"right again: blob {blob}" for blob in result["repaired"])
    is_part = result["checked_blobs"] < result["blobs"]
    checked = f"{result['checked_blobs']} of " if is_part else ""
    of = "" if is_part else f", for {count(result['checked_checkpoints'], 'checkpoint')}"
    say(f"checked {checked}{count(result['blobs'], 'blob')}, {size(result['checked_bytes'])}{of}")
    if result["decoded_bytes"]:
        say(f"decoded {size(result['decoded_bytes'])} of coded cells")
    say_all(_to_do(result) or [f"{'what was checked' if is_part else 'all'} is well"])


def say_damage(
    what: str, blobs: list[dict[str, Any]], manifests: list[dict[str, Any]], records: list[dict[str, Any]]
) -> None:
    """Say of each of these ``what`` it is, and why."""
    for one in blobs:
        say(f"{what} blob {one['blob']}: {printable(one['why'])}")
        say(f"  {needed(one)}")
    for one in manifests:
        say(f"{what} manifest of {printable(one['run'])}@{one['step']} {one['id']}: {printable(one['why'])}")
    say_all(f"{what} record {printable(one['key'])}: {printable(one['why'])}" for one in records)


def needed(damaged: dict[str, Any]) -> str:
    """Say who needs the bytes of a blob that are damaged."""
    if not damaged["keys"]:
        return "no checkpoint needs the bytes that are wrong"
    users = list(dict.fromkeys(f"{printable(one['run'])}@{one['step']}" for one in damaged["needed_by"]))
    return f"needed by {', '.join(shortened(users, 5))}: {printable(', '.join(shortened(damaged['keys'], 5)))}"


def about_records(records: list[dict[str, Any]]) -> list[str]:
    """Say what to do about records that cannot be read."""
    if not records:
        return []
    damaged = count(len(records), "record")
    return [
        f"{damaged} damaged: put the files back from a copy of the files (`casckpt copy` makes records of its own);",
        "without one, set tags again, and give up the saves with `casckpt transactions STORE --give-up TXID`",
    ]


def _to_do(result: dict[str, Any]) -> list[str]:
    lines = []
    if result["failed"]:
        lines.append(f"{count(len(result['failed']), 'blob')} could not be read: try again")
    lines += about_records(result["records"])
    if damaged := len(result["damaged"]) + len(result["manifests"]):
        lines.append(f"{damaged} damaged: run `casckpt repair`")
    if unsigned := len(result["unsigned"]):
        lines.append(f"{count(unsigned, 'checkpoint')} not signed: who knows them to be right runs `casckpt sign`")
    return lines
