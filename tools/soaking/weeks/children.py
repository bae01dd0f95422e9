"""The processes that the driver starts: ``python -m soaking.weeks.children ROLE ...``, each with one of the libraries.

The environment names the driver, and sets the clock of the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from soaking.books import Books, Wrong

WRONG, FULL = 3, 28
"""Exit statuses: for a broken invariant, and for a job whose last save found no room (ENOSPC)."""
AHEAD, DRIVER = "SOAK_CLOCK_AHEAD", "SOAK_DRIVER"
"""Environment variables: by how many seconds the clock is ahead, and the id of the driver's process."""


def _set_clock(seconds: float) -> None:
    """Change the time that Python tells. The times of files stay right, as on a file server."""
    real = time.time_ns
    time.time_ns = lambda: real() + round(seconds * 1e9)
    time.time = lambda: time.time_ns() / 1e9


def train(asked: Mapping[str, Any]) -> None:
    """Run one rank of a job."""
    from soaking.weeks import training

    training.train(asked)


def _compare(store: Any, one: Any, ledger: Any) -> None:
    """Read a checkpoint and compare it with the books. If it is thinned, or becomes thinned, compare the rest."""
    from casckpt.errors import MissingKey
    from soaking.weeks.ledger import digests

    whole = one.dropped is None
    try:
        found = digests(store.read(one, keys=["model.*", "optim.*"] if whole else ["model.*"]))
    except MissingKey:
        one = store.get(one.id)
        if not whole or one.dropped is None:
            raise
        _compare(store, one, ledger)
    else:
        ledger.check(one.step, one.metadata["job"], found, thinned=not whole)


def follow(asked: Mapping[str, Any]) -> None:
    """Read each new checkpoint and compare it. Record the memory, open files and threads of this process."""
    import casckpt
    from casckpt.errors import NotFound
    from soaking.growth import held
    from soaking.weeks.ledger import RUN, Ledger

    books, began, sampled = Books(Path(asked["folder"])), time.monotonic(), 0.0
    ledger, store, name = Ledger(books), casckpt.open(asked["store"]), asked["name"]
    for new in store.watch(RUN, after="start", latest_only=True, poll=asked["poll"]):
        try:
            _compare(store, new.checkpoint, ledger)
        except NotFound:  # removed by now
            books.note("followed", step=new.checkpoint.step, by=name, gone=True)
        else:
            books.note("followed", step=new.checkpoint.step, by=name, gone=False)
        if time.monotonic() > sampled + asked["sample_every"]:
            sampled = time.monotonic()
            store.checkpoints()
            listing = time.monotonic() - sampled
            at = asked["at"] + sampled - began
            books.note(f"samples.{name}.{os.getpid()}.{asked['began']}", at=at, listing=listing, **held())


def look(asked: Mapping[str, Any]) -> None:
    """Print the visible checkpoints of a store, and how long the listing took."""
    import casckpt

    store, began = casckpt.open(asked["store"]), time.monotonic()
    there = store.checkpoints() if store.exists() else []
    seconds = time.monotonic() - began
    told = [
        {
            "step": one.step, "job": one.metadata["job"], "id": one.id, "created": one.created_at.timestamp(),
            "loss": one.metrics["loss"],
        } for one in there
    ]  # fmt: skip
    print(json.dumps({"seconds": seconds, "checkpoints": told if asked["known"] else [], "count": len(there)}))


def check(asked: Mapping[str, Any]) -> None:
    """Check everything in a store. Print the counts."""
    import casckpt
    from soaking.looks import check_objects
    from soaking.weeks.ledger import RUN, Ledger

    ledger, keys = Ledger(Books(Path(asked["folder"]))), asked["keys"]
    plain = casckpt.open(asked["store"])
    trusting = [casckpt.open(asked["store"], require_signature=key) for key in keys]
    found = plain.verify(decode=True)
    if found.is_damaged or found.failed:
        raise Wrong(f"{plain.url}: {found}")
    there = plain.checkpoints(RUN)
    for one in there:
        known = ledger.begun.get((one.step, one.metadata["job"]), {"key": 0})
        store = trusting[known["key"]]
        _compare(store, store.get(one.id), ledger)
    check_objects(plain)
    thinned, tagged = sum(one.dropped is not None for one in there), sorted({one.step for one in plain.tags().values()})
    steps = [one.step for one in there]
    print(json.dumps({"steps": steps, "thinned": thinned, "blobs": found.checked_blobs, "tagged": tagged}))


ROLES: dict[str, Callable[[Mapping[str, Any]], None]] = {"train": train, "follow": follow, "look": look, "check": check}


def main() -> int:
    """Run a role, or a command of casckpt."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with the driver
    if os.getppid() != int(os.environ[DRIVER]):
        return 1
    faulthandler.enable()
    _set_clock(float(os.environ[AHEAD]))
    role, *rest = sys.argv[1:]
    if role == "casckpt":
        from casckpt.cli.main import main as command

        sys.argv = ["casckpt", *rest]
        command()
        return 0
    asked = json.loads(rest[0])
    try:
        ROLES[role](asked)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding, unless the driver has killed a rank
        traceback.print_exc()
        Books(Path(asked["folder"])).note("errors", role=role, job=asked.get("number"), text=traceback.format_exc())
        return WRONG if isinstance(error, Wrong) else FULL if getattr(error, "full", False) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
