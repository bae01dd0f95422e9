"""Listing and planning in a store of 1,000 checkpoints and a million blobs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult
from benchmarks.scenarios.base import Bench, Options
from benchmarks.teams import Team

_ROUNDS = 3
_MEMORY = 500e6
_LOOKS = ("list", "stats", "gc plan")
FIRST, LATER, NEWER = "first look", "later look", "after one more checkpoint"


@dataclass
class _Store:
    """The location and current size of the store."""

    folder: str
    blobs: int
    checkpoints: int = 0

    def cache(self, name: str) -> str:
        return str(Path(self.folder).with_name(name))


def catalogue(options: Options) -> ScenarioResult:
    """Run each operation in a new process.

    The first operations start with an empty catalogue. The store's files are in the page cache.
    """
    checkpoints, blobs = (20, 20) if options.quick else (1000, 1000)
    options.rounds = min(options.rounds, _ROUNDS)
    with Bench(options) as bench:
        store = _Store(bench.place(), blobs)
        options.tell(f"creating a store of {checkpoints:,} checkpoints")
        _grow(bench, store, checkpoints)
        cases = [_case(bench, store, group, what) for group in (FIRST, LATER, NEWER) for what in _LOOKS]
        rows = bench.run(cases, warm_up=0)
        checks = [
            Check(f"{row.group}, {row.what}: peak extra memory (bytes)", _MEMORY, False, row.median("peak"))
            for row in rows
        ]
        title = f"{checkpoints:,} checkpoints, {checkpoints * blobs:,} blobs"
        return bench.result("catalogue", title, checks, checkpoints=checkpoints, blobs=checkpoints * blobs)


def _grow(bench: Bench, store: _Store, count: int) -> None:
    job = {"folder": store.folder, "checkpoints": count, "blobs": store.blobs, "first": store.checkpoints}
    bench.team().call("catalogue:build", **job)
    store.checkpoints += count


def _case(bench: Bench, store: _Store, group: str, what: str) -> Case:
    def look(cache: str) -> Measured:
        sizes = {"checkpoints": store.checkpoints, "blobs": store.blobs}
        with Team(bench.options.folder) as team:
            return team.measure("catalogue:look", folder=store.folder, cache=cache, what=what, **sizes)

    def first(number: int) -> Measured:
        cache = store.cache(f"{what} {number}")
        try:
            return look(cache)
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    def later(_: int) -> Measured:
        cache = store.cache(f"{what} later")
        if not Path(cache).exists():
            look(cache)
        look(cache)  # other cases may have added a checkpoint in the meantime
        return look(cache)

    def newer(_: int) -> Measured:
        cache = store.cache(f"{what} newer")
        look(cache)
        _grow(bench, store, 1)
        return look(cache)

    runs: dict[str, Callable[[int], Measured]] = {FIRST: first, LATER: later, NEWER: newer}
    return Case(Row(group, OURS, what), runs[group], ours=True)
