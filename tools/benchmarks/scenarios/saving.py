"""Saves by one process: of a new state, an unchanged state, and a mostly frozen state, and in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.base import ASYNC, SAVE, Peer, Setting
from benchmarks.results import OURS, Check, Row, ScenarioResult, best, binding, median_of, over
from benchmarks.scenarios.base import BLOB, DISK, WAY, WRITERS, Bench, Options
from benchmarks.teams import Team
from benchmarks.values import ADAPTERS

_STATE = "state"
_USUAL = 3 << 29  # 1.5 GiB
HASHES = "raw BLAKE3"
_COPY = "copy and BLAKE3"
_WRITES = "raw direct write of what changed"


def save(options: Options) -> ScenarioResult:
    """Measure a full durable save of a state that is new to the store."""
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "model", options.size_or(_USUAL))
        limits = [
            raw_hashes(bench, size),
            bench.limit(_COPY, "all cores", "limits:copy_and_hash", nbytes=size, state=_STATE),
        ]
        rows = bench.run(
            [*full_saves(bench, size), *bench.disk("write", size), *limits, *bench.ways(_STATE, size, to_gpu=False)]
        )
        for row in rows:
            row.bounds = [DISK, *([HASHES] if row.who == OURS else [])] if not row.limit else []
        ours = next(row for row in rows if row.who == OURS)
        cpu = over(ours.median("cpu"), time_of(rows, _COPY, "cpu"))
        checks = [
            Check("the limit that binds / casckpt", 0.9, True, reached(rows, ours)),
            Check("DCP / casckpt", 1.3, True, over(time_of(rows, "dcp"), ours.median("durable"))),
            Check("CPU: casckpt / one copy and BLAKE3", 1.25, False, cpu),
            memory_check(rows, options.threads),
        ]
        return bench.result("save", "Full durable save, one process", checks, bytes=size)


def resave(options: Options) -> ScenarioResult:
    """Measure a save of a state that has not changed since the last save. Peers rewrite all of it."""
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "model", options.size_or(_USUAL))
        hashes = raw_hashes(bench, size)
        rows = bench.run([*steps(bench, size), *full_saves(bench, size, ours=False), hashes])
        ours = time_of(rows, OURS)
        written = best(rows, OURS, "durable")
        checks = [
            Check("raw BLAKE3 / casckpt", 0.85, True, over(time_of(rows, HASHES), ours)),
            Check("full DCP save / casckpt", 8.0, True, over(time_of(rows, "dcp"), ours)),
            Check("blob bytes written", 0.0, False, median_of(written, "blob_bytes")),
        ]
        return bench.result("resave", "Save of an unchanged state", checks, bytes=size)


def frozen(options: Options) -> ScenarioResult:
    """Measure a save after a step that changed only the adapters, which are 4 % of the bytes."""
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "adapted", options.size_or(_USUAL))
        changed = bench.change_state(_STATE, ADAPTERS)
        ours = [
            *steps(bench, size, change=ADAPTERS),
            *steps(bench, size, change=ADAPTERS, setting={"frozen": True}),
        ]  # fmt: skip
        limits = [
            raw_hashes(bench, size),
            *_raw_writes(bench, changed),
        ]
        rows = bench.run([*ours, *full_saves(bench, size, ours=False), *limits])
        return bench.result(
            "frozen", "Save with 96 % unchanged", _frozen_checks(rows, changed), bytes=size, changed_bytes=changed
        )


def _frozen_checks(rows: list[Row], changed: int) -> list[Check]:
    plain = next(row for row in rows if row.who == OURS and not row.what)
    declared = next(row for row in rows if row.who == OURS and row.what)
    hashing, writing = time_of(rows, HASHES), time_of(rows, _WRITES)
    floor = hashing + writing if hashing is not None and writing is not None else None
    return [
        Check("blob bytes written / changed bytes", 1.02, False, over(plain.median("blob_bytes"), changed)),
        Check("casckpt / (raw BLAKE3 of all + raw write of what changed)", 1.0, False,
              over(plain.median("durable"), floor)),
        Check("declared frozen: casckpt / raw write of what changed", 2.0, False,
              over(declared.median("durable"), writing)),
    ]  # fmt: skip


def in_background(options: Options) -> ScenarioResult:
    """Measure how long the caller waits for background saves while the state changes.

    Every byte changes from save to save.
    """
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "model", options.size_or(_USUAL))
        place = bench.place()  # only casckpt uses this, because its store remains open

        def run(peer: type[Peer], setting: Setting, team: Team, _: int) -> Measured:
            team.call("states:change", name=_STATE)
            folder = place if peer.name == OURS else bench.place()
            job = {"peer": peer.name, "setting": setting, "state": _STATE, "folder": folder}
            measured = team.measure("storing:save_in_background", **job)
            team.call("storing:load", **job)
            if peer.name != OURS:
                team.call("storing:delete", folder=folder)
            return measured

        copies = [
            bench.limit("memcpy", f"{n} threads", "limits:copy", nbytes=size, state=_STATE, threads=n)
            for n in dict.fromkeys((1, options.threads))
        ]
        copies += bench.ways(_STATE, size, to_gpu=False)
        rows = bench.run([*bench.cases(ASYNC, run, nbytes=size), *copies])
        way = "memcpy" if options.device == "cpu" else WAY
        ours, copy = time_of(rows, OURS, "blocked"), time_of(rows, way, "blocked")
        checks = [Check("blocked / one copy into touched memory", 1.2, False, over(ours, copy))]
        return bench.result(
            "async", "Time the caller waits for a save in the background", checks, "blocked", bytes=size
        )


def full_saves(bench: Bench, size: int, *, ours: bool = True, state: str = _STATE, work: str = SAVE) -> list[Case]:
    """Measure saves, each into a new location. Each save is checked by a load and then removed."""

    def run(peer: type[Peer], setting: Setting, team: Team, _: int) -> Measured:
        return saved_once(bench, team, {"peer": peer.name, "setting": setting, "state": state})

    return bench.cases(work, run, nbytes=size, only=lambda peer, _: ours or peer.name != OURS)


def saved_once(bench: Bench, team: Team, job: Mapping[str, Any]) -> Measured:
    """Save once into a new location, check the result, and remove it."""
    folder = bench.place()
    try:
        measured = team.measure("storing:save", **job, folder=folder)
        team.call("storing:load", **job, folder=folder)
        return measured
    finally:
        team.call("storing:delete", folder=folder)


def steps(
    bench: Bench, size: int, *, change: str | None = None, setting: Setting | None = None, state: str = _STATE
) -> list[Case]:
    """Measure casckpt's saves of a training run into a store, after a first save that does not count."""
    job = {"peer": OURS, "setting": setting or {}, "state": state, "folder": bench.place()}

    def run(_: type[Peer], __: Setting, team: Team, number: int) -> Measured:
        if number == 0:
            team.measure("storing:save", **job)
        if change is not None:
            bench.change_state(state, change)
        measured = team.measure("storing:save", **job)
        team.call("storing:load", **job)
        return measured

    cases = bench.cases(SAVE, run, nbytes=size, only=lambda peer, _: peer.name == OURS)
    for case in cases:
        case.row.what = "frozen= declared" if setting else ""
        if setting:
            case.run = _if_offered(bench, case.run)
    return cases


def _if_offered(bench: Bench, run: Callable[[int], Measured]) -> Callable[[int], Measured]:
    def guarded(number: int) -> Measured:
        bench.team().call("storing:offers_frozen")
        return run(number)

    return guarded


def _raw_writes(bench: Bench, size: int) -> list[Case]:
    """Measure the limits of the disk for a few bytes, with which fio would take most of its time to start."""
    return [
        bench.limit(_WRITES, f"{n} writers", "limits:write", nbytes=size, folder="new", size=size, writers=n)
        for n in bench.several(WRITERS)
    ]


def raw_hashes(bench: Bench, size: int, group: str = "") -> Case:
    """Measure the limits of hashing on all cores."""
    return bench.limit(HASHES, "all cores", "limits:hashes", group=group, nbytes=size, state=_STATE)


def reached(rows: list[Row], row: Row | None) -> float | None:
    """Return the fraction of its binding limit that a row reaches."""
    limit = binding(rows, row) if row else None
    return over(median_of(limit, "durable"), median_of(row, "durable"))


def time_of(rows: list[Row], who: str, metric: str = "durable", *, group: str | None = None) -> float | None:
    """Return the median of a participant's best row."""
    return median_of(best(rows, who, metric, group=group), metric)


def memory_check(rows: list[Row], threads: int) -> Check:
    """Check the additional memory, in blob buffers per worker."""
    row = best(rows, OURS, "durable")
    return Check("peak extra memory / blob buffers of all workers", 4.0, False,
                 over(median_of(row, "peak"), BLOB * threads))  # fmt: skip
