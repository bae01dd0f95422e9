"""Processes that inherit only what the test passes to them and start with torch already imported."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def afresh() -> ForkServerContext:
    """Starts processes as "spawn" does, but forks them from a process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context
