"""``casckpt doctor``."""

from __future__ import annotations

from typing import Any, Final

from casckpt.cli.describe import plain
from casckpt.cli.failures import FAILED
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, printable, say

_WORDS: Final = {True: "ok", False: "NOT OK", None: "note"}


@store_command("doctor")
def command(session: Session) -> int:
    """Check whether a storage is safe for a store.

    Also measures its speed. No store needs to exist there. Writes small objects, and a few of 8 MiB, under probes/, and
    deletes them again. Exit status 1 if a check fails.
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
