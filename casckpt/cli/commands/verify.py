"""``casckpt verify``, ``casckpt repair``, ``casckpt sign``, and ``casckpt doctor``, which checks a storage backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from casckpt.cli.describe import plain
from casckpt.cli.failures import FAILED
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, say_all, shortened, size
from casckpt.cli.types import PART
from casckpt.errors import Damaged

if TYPE_CHECKING:
    from casckpt.store.types import Mode


@store_command("verify", loads=True)
@click.argument("refs", nargs=-1, metavar="[REF]...")
@click.option(
    "--quick", is_flag=True, help="Only check that blobs exist, have the right size, and are not marked as damaged."
)
@click.option("--part", type=PART, default="1/1", metavar="K/N", help="Check only the K-th of N parts of the blobs.")
@click.option("--decode", is_flag=True, help="Also decode encoded cells, and compare them with their digests.")
def command(session: Session, refs: tuple[str, ...], quick: bool, **options: Any) -> int:
    """Read all bytes and compare them with their hashes.

    Reads all data of all checkpoints, or of those that you name. Marks damaged blobs, so that saves do not use them.
    `casckpt repair` repairs them if possible. The exit status is 4 if anything is damaged. With --require-signature,
    it is 1 if a checkpoint has no signature from any of these keys.
    """
    with progress_bar("verifying") as done:
        mode: Mode = "exists" if quick else "full"
        result = session.store.verify(*refs, mode=mode, progress=done, **options)
    session.give(plain(result), text)
    if result.is_damaged:
        return Damaged.exit_status
    return FAILED if result.failed or result.unsigned else 0


@store_command("sign")
@click.argument("refs", nargs=-1, required=True, metavar="REF...")
@click.option(
    "--key", required=True, metavar="FILE", help="The private key: an Ed25519 key made by OpenSSL or ssh-keygen."
)
@click.option("--password", is_flag=True, help="Ask for the key's password.")
def sign(session: Session, refs: tuple[str, ...], key: str, password: bool) -> None:
    """Sign checkpoints.

    Stores a signature of each checkpoint's id. The signature remains valid after repair, copy and thin. gc deletes it
    together with its checkpoint. REF may be a range of steps. Readers can require signatures with casckpt.open(...,
    require_signature=KEY).
    """
    word = click.prompt("password", hide_input=True, err=True).encode() if password else None
    session.give(plain(session.store.sign(*refs, key=key, password=word)), _signed)


def _signed(result: list[dict[str, Any]]) -> None:
    say_all(f"signed {name(one)}" for one in result)


def text(result: dict[str, Any]) -> None:
    """Print the amount of checked data, and any damage."""
    say_damage("damaged", result["damaged"], result["manifests"], result["records"])
    say_all(f"could not read blob {one['blob']}: {printable(one['why'])}" for one in result["failed"])
    say_all(f"not signed: {name(one)}" for one in result["unsigned"])
    say_all(f"no longer damaged: blob {blob}" for blob in result["repaired"])
    is_part = result["checked_blobs"] < result["blobs"]
    checked = f"{result['checked_blobs']} of " if is_part else ""
    of = "" if is_part else f", for {count(result['checked_checkpoints'], 'checkpoint')}"
    say(f"checked {checked}{count(result['blobs'], 'blob')}, {size(result['checked_bytes'])}{of}")
    if result["decoded_bytes"]:
        say(f"decoded {size(result['decoded_bytes'])} of encoded cells")
    say_all(_to_do(result) or [f"{'the checked data' if is_part else 'all'} is well"])


def say_damage(
    what: str, blobs: list[dict[str, Any]], manifests: list[dict[str, Any]], records: list[dict[str, Any]]
) -> None:
    """For each damaged file, print a line with the reason. Each line begins with ``what``."""
    for one in blobs:
        say(f"{what} blob {one['blob']}: {printable(one['why'])}")
        say(f"  {needed(one)}")
    for one in manifests:
        say(f"{what} manifest of {printable(one['run'])}@{one['step']} {one['id']}: {printable(one['why'])}")
    say_all(f"{what} record {printable(one['key'])}: {printable(one['why'])}" for one in records)


def needed(damaged: dict[str, Any]) -> str:
    """Format the names of the checkpoints and keys that need a damaged blob."""
    if not damaged["keys"]:
        return "not needed by any checkpoint"
    users = list(map(name, damaged["needed_by"]))
    return f"needed by {', '.join(shortened(users, 5))}: {printable(', '.join(shortened(damaged['keys'], 5)))}"


def about_records(records: list[dict[str, Any]]) -> list[str]:
    """Return advice on unreadable records."""
    if not records:
        return []
    damaged = count(len(records), "record")
    return [
        f"{damaged} damaged: restore the files from a backup of the store's files (`casckpt copy` writes new records);",
        "without one, do what is said above, and set the tags again",
    ]


def _to_do(result: dict[str, Any]) -> list[str]:
    lines = []
    if result["failed"]:
        lines.append(f"{count(len(result['failed']), 'blob')} could not be read: retry")
    lines += about_records(result["records"])
    if damaged := len(result["damaged"]) + len(result["manifests"]):
        lines.append(f"{damaged} damaged: run `casckpt repair`")
    if unsigned := len(result["unsigned"]):
        lines.append(f"{count(unsigned, 'checkpoint')} not signed: if you trust them, run `casckpt sign`")
    return lines


_WORDS: Final = {True: "ok", False: "NOT OK", None: "note"}


@store_command("doctor")
def doctor(session: Session) -> int:
    """Check whether storage is safe for a store.

    STORE need not exist. The command writes small objects under probes/, and then deletes them. The exit status is 1 if
    a check fails.
    """
    checks = []
    for finding in session.store.doctor():
        checks.append(plain(finding))
        if not session.as_json:
            _say_check(checks[-1])
    bad = [check["name"] for check in checks if check["ok"] is False]
    session.give({"url": session.store.url, "ok": not bad, "checks": checks}, _summary)
    return FAILED if bad else 0


def _say_check(check: dict[str, Any]) -> None:
    say(f"{_WORDS[check['ok']]:6}  {check['name']:16}  {printable(check['found'])}")
    if check["advice"] and check["ok"] is not True:
        say(f"{'':6}  {'':16}  -> {printable(check['advice'])}")


def _summary(result: dict[str, Any]) -> None:
    bad = sum(check["ok"] is False for check in result["checks"])
    say("all is well" if not bad else f"{count(bad, 'check')} not ok: see the arrows above")


@store_command("repair")
@click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="STORE",
    help="A second store to copy intact bytes from. May be repeated.",
)
def repair(session: Session, sources: tuple[str, ...]) -> int:
    """Repair damaged blobs and manifests.

    Copies them from intact copies: in this store, in this host's cache, and in other stores. Damaged records of commits
    and tags are only reported: restore those files from a backup. The exit status is 4 if something cannot be repaired.
    """
    from casckpt.store.opening import open as open_store

    others = [open_store(url, storage_options=session.storage_options, cache_dir=session.cache_dir) for url in sources]
    with progress_bar("repairing") as done:
        result = session.store.repair(*others, progress=done)
    session.give(plain(result), repaired_text)
    return Damaged.exit_status if result.is_damaged else 0


def repaired_text(result: dict[str, Any]) -> None:
    """Print which blobs and manifests were repaired and which are lost."""
    say_all(f"repaired blob {blob}" for blob in result["blobs"])
    say_all(f"repaired manifest {id}" for id in result["manifests"])
    say_damage("not repaired:", result["lost"], result["lost_manifests"], result["records"])
    say(f"repaired {count(len(result['blobs']) + len(result['manifests']), 'object')}")
    if result["lost"] or result["lost_manifests"]:
        say(
            "pass a copy of the store, such as its mirror, with --from. The undamaged tensors of these checkpoints can "
            "still be loaded, or exported with `casckpt export --keys`. To give up the checkpoints, hide them with "
            "`casckpt forget`. A gc deletes hidden checkpoints a day later. `--run RUN --min-age 0` makes a gc delete "
            "them immediately (not if the settings have a min_age), together with all other forgotten checkpoints of "
            "that run. After that, `casckpt copy` can bring a checkpoint back from another store that names it"
        )
    say_all(about_records(result["records"]))
