"""Processes that inherit only what they are given, and that need not import everything first."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def afresh() -> ForkServerContext:
    """Makes processes as "spawn" does, forked from one that has imported what most of them need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context
