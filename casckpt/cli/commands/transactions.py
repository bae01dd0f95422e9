"""``casckpt transactions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import moment, printable, say
from casckpt.errors import Conflict, NotFound, Refused

if TYPE_CHECKING:
    from casckpt.format.names import TxId
    from casckpt.format.records import Process
    from casckpt.repository.repository import Repository
    from casckpt.repository.transactions import OpenTransaction

_ALIVE = {True: "alive", False: "dead", None: "on another host, or not known"}


@store_command("transactions")
@click.option("--revoke", metavar="TXID", help="Give up on this save: nothing of it will be visible.")
@click.option(
    "--give-up", metavar="TXID", help="End a transaction whose record is lost or cannot be read: so is its checkpoint."
)
def command(session: Session, revoke: str | None, give_up: str | None) -> None:
    """List the saves in progress.

    A gc waits for them. Revoking is safe: at worst a save that was alive fails, and is made again. Giving up is for a
    record that is lost, or damaged beyond help, and that keeps gc from working.
    """
    if give_up is not None and revoke is not None:
        raise click.UsageError("--revoke is for a save in progress, --give-up for a damaged one: give one of them")
    if give_up is not None:
        session.give({"given_up": _give_up(session.repository, give_up)}, lambda result: say(f"gave up {give_up}"))
    elif revoke is None:
        session.give(_open(session.repository), _text)
    else:
        session.give({"revoked": _revoke(session.repository, revoke)}, lambda result: say(f"revoked {revoke}"))


def _open(repo: Repository) -> list[dict[str, Any]]:
    from casckpt.repository.commits import list_names
    from casckpt.repository.transactions import open_transactions

    repo.marker  # noqa: B018  # no store is not the same as no saves
    found = open_transactions(repo, list_names(repo))
    ended = list_names(repo) if found else set()
    return [_described(repo, one) for one in found if one.txid not in ended]


def _described(repo: Repository, one: OpenTransaction) -> dict[str, Any]:
    from casckpt.format.keys import parse_txid
    from casckpt.format.records import time_of
    from casckpt.repository.transactions import has_died

    name = parse_txid(one.txid)
    row = {"txid": one.txid, "run": None, "step": name.step, "since": name.time.isoformat(), "signs_of_life": one.signs}
    if one.began is None:
        return row | {"host": None, "pid": None, "alive": None}
    process = one.began.process
    since = time_of(one.began.time).isoformat()
    alive = _alive(process)
    if alive is False and not has_died(repo, one):
        alive = None  # another process has joined: a copy that goes on
    return row | {
        "run": one.began.run, "since": since, "host": process.host, "pid": process.pid, "alive": alive
    }  # fmt: skip


def _alive(process: Process) -> bool | None:
    """None where this host cannot know."""
    from casckpt.repository.processes import is_dead, this_process

    if is_dead(process):
        return False
    here = this_process()
    same = bool(here.boot_id) and (process.boot_id, process.pid_namespace) == (here.boot_id, here.pid_namespace)
    return True if same else None


def _give_up(repo: Repository, name: str) -> str:
    from casckpt.repository.commits import list_commits, purge_unreadable
    from casckpt.repository.lost import lost_records
    from casckpt.repository.stock import list_objects
    from casckpt.repository.transactions import revoke

    txid = _txid(name, "--give-up")
    listed = list_commits(repo, anew=True)
    if txid in listed.commits:
        raise Conflict(f"the records of {txid} can be read; `casckpt forget` takes its checkpoint out of sight")
    if txid in listed.damaged:
        purge_unreadable(repo, txid)
    elif txid not in lost_records(repo, list_objects(repo)) or not revoke(repo, txid, "lost, and given up by hand"):
        raise NotFound(f"there is no transaction {txid} whose record cannot be read; `casckpt verify STORE` names them")
    return txid


def _txid(name: str, option: str) -> TxId:
    from casckpt.format.keys import check_txid

    try:
        return check_txid(name)
    except Refused as error:
        raise click.BadParameter(f"{error}; `casckpt transactions STORE` lists them", param_hint=option) from error


def _revoke(repo: Repository, name: str) -> str:
    from casckpt.repository.commits import list_names
    from casckpt.repository.transactions import open_transactions, revoke

    txid = _txid(name, "--revoke")
    closed = list_names(repo)
    if txid not in closed and txid not in {one.txid for one in open_transactions(repo, closed)}:
        raise NotFound(f"there is no save {txid} in progress; `casckpt transactions STORE` lists them")
    if txid in closed or not revoke(repo, txid, "revoked by hand, with casckpt transactions --revoke"):
        raise Conflict(f"save {txid} has ended already; `casckpt list STORE` shows whether it was committed")
    return txid


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
