"""``casckpt transactions``."""

from __future__ import annotations

from typing import Any

import click

from casckpt.base.names import is_txid
from casckpt.cli.describe import plain
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import moment, printable, say

_ALIVE = {True: "alive", False: "dead", None: "on another host, or not known"}


@store_command("transactions")
@click.option("--revoke", metavar="TXID", help="End this save: nothing of it will be visible.")
@click.option(
    "--give-up", metavar="TXID", help="End a transaction whose record, and so its checkpoint, is lost or unreadable."
)
def command(session: Session, revoke: str | None, give_up: str | None) -> None:
    """List the saves in progress.

    gc waits for them. --revoke is safe: at worst, a save that was alive fails, and casckpt tries it again. --give-up is
    for a record that is lost or damaged beyond repair and keeps gc from working.
    """
    if give_up is not None and revoke is not None:
        raise click.UsageError("--revoke is for a save in progress, --give-up for a damaged one: give one of them")
    if give_up is not None:
        session.store.give_up(_txid(give_up, "--give-up"))
        session.give({"given_up": give_up}, lambda result: say(f"gave up {give_up}"))
    elif revoke is None:
        session.give(plain(session.store.transactions()), _text)
    else:
        session.store.revoke(_txid(revoke, "--revoke"))
        session.give({"revoked": revoke}, lambda result: say(f"revoked {revoke}"))


def _txid(name: str, option: str) -> str:
    if not is_txid(name):
        raise click.BadParameter(
            f"not a transaction id: {name[:120]!r}; `casckpt transactions STORE` lists them", param_hint=option
        )
    return name


def _text(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        say(row["txid"])
        run = f"{row['run']}@{row['step']}" if row["run"] else f"step {row['step']}"
        process = (
            f"process {row['pid']} on {row['host']} ({_ALIVE[row['alive']]})" if row["host"] else "process not known"
        )
        say(f"  {printable(run)}, since {moment(row['since'])} UTC, {printable(process)}")
    if not rows:
        say("no save is in progress")
