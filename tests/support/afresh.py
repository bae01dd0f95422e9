"""Processes that inherit only what the test passes to them, start with torch imported, and rarely collect garbage."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

_PEERS = {name: name for name in ("transformers.trainer", "diffusers.training_utils", "lightning.pytorch")}
_PEERS["tests.support.preload_megatron"] = "tests.support.megatron_core"
"""Modules whose imports take one to four seconds of CPU time each, and those that show that they will be needed."""


def afresh() -> ForkServerContext:
    """Starts processes as "spawn" does, but forks them from a process that has imported torch.

    That process also imports the large peers that the test process needs, as far as is known by then.
    """
    context = multiprocessing.get_context("forkserver")
    peers = [name for name, sign in _PEERS.items() if sign in sys.modules]
    context.set_forkserver_preload([*peers, "tests.support.preload"])  # preload comes last, because it freezes objects
    return context


def share_fork_server(log: Path) -> None:
    """Start the process from which `afresh` forks, and let it serve the forks of this process too.

    Its imports take 8 seconds of CPU time. Its stderr, which its children inherit, goes to the file ``log``.
    """
    afresh()
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    inherit_fork_server()  # only its parent can check whether it is running, and forks would start another one


def inherit_fork_server() -> None:
    """Let `afresh` use the process from which this process was forked, and not start another one."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def collect_less() -> None:
    """Exclude all present objects from garbage collections, and collect others less often.

    A full collection takes half a second with the objects of torch, and a tenth without them.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
