"""The savings and costs of encodings and deltas for states of real training runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import Case, Enough
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options

_TRACES = {"rl": "RL, 1e-6", "ft": "fine-tuning, 2e-5", "gpt": "from scratch, 6e-4"}
_QUICK = {"quick": "smoke run"}
_SAVES, _FEW = 64, 8
_GIB = 1 << 30
_LIMITS = {"weights": 0.68, "master": 0.845, "exp_avg": 0.845, "exp_avg_sq": 0.81}  # for planes, by part
_LOAD = 2.4  # with two cores: 1.2 times the load time of raw cells from a bucket at 1 GB/s
_RUN, _ALONE, _STATES, _DELTAS = "versions of RL", "alone", "whole states, ", "; deltas of weights"
_WHOLE = (  # for states this many steps apart
    (10, "matrices", 0.81),
    (10, "matrices" + _DELTAS, 0.73),
    (10, "matrices, float32", 0.83),
    (10, "matrices, float32" + _DELTAS, 0.74),
    (100, "matrices, float32" + _DELTAS, 0.76),
)
_PLACES = {"a folder": 0.0, "a bucket, 50 MB/s": 50e6, "a bucket, 300 MB/s": 300e6, "a bucket, 1 GB/s": 1e9}
_MODES = ("off", "auto", "always")
_NOISE, _FAST = "noise", "a bucket, 1 GB/s"
_KINDS = {"alone": (OURS, "zstd-1", "zipnn", "dcp"), "delta": (OURS, "zstd-1")}


def deltas(options: Options) -> ScenarioResult:
    """Encode encoder matrices, or whole states.

    Everything is decoded and compared. The traces are recorded in training runs of a few minutes, and are kept.
    """
    with Bench(options) as bench:
        traces = _QUICK if options.quick else _TRACES
        steps = {name: bench.team().call("deltas:make", folder=_folder(bench), name=name)[0] for name in traces}
        cases = [*_versions(bench, next(iter(traces)))]
        for name, about in traces.items():
            cases += _distances(bench, name, about, steps[name])
        rows = bench.run(cases, warm_up=0)
        return bench.result("deltas", "States of real trainings, coded", _checks(rows, traces), "stored")


def runs(options: Options) -> ScenarioResult:
    """Save versions of an RL training run through `Store.save`.

    The bucket is a folder behind a connection of limited speed.
    """
    with Bench(options) as bench:
        name = next(iter(_QUICK if options.quick else _TRACES))
        bench.team().call("deltas:make", folder=_folder(bench), name=name)
        places = {"a folder": 0.0} if options.quick else _PLACES
        saves = _FEW if options.quick else _SAVES
        cases = [
            _case_of(
                bench,
                Row(f"saves into {where}", OURS, mode),
                "runs:replay",
                name=name,
                saves=saves,
                compress=mode,
                rate=rate,
            )
            for where, rate in places.items()
            for mode in _MODES
        ]
        return bench.result("runs", "Versions of RL in a store", _run_checks(bench.run(cases, warm_up=0)), "durable")


def _case_of(bench: Bench, row: Row, task: str, **arguments: Any) -> Case:
    """Return a case with a new location in each round."""

    def run(_: int) -> Measured:
        return bench.team().measure(task, folder=_folder(bench), place=bench.place(), **arguments)

    return Case(row, run, ours=True)


def _run_checks(rows: list[Row]) -> list[Check]:
    """Return the targets for each location with deltas."""
    found = [row for row in rows if row.what == "auto"]
    return [
        check
        for row in found
        for check in (
            Check(f"{row.group}: share of as many copies", 0.03, False, row.median("share")),
            Check(f"{row.group}: newest / first, cold load", 1.2, False,
                  over(row.median("newest cold"), row.median("first cold"))),
            Check(f"{row.group}: copies after a gc", 2.2, False, row.median("kept")),
        )
    ]  # fmt: skip


def coded(options: Options) -> ScenarioResult:
    """Save enough bytes to measure a speed: RL versions, and noise, which cannot be compressed."""
    with Bench(options) as bench:
        name = next(iter(_QUICK if options.quick else _TRACES))
        bench.team().call("deltas:make", folder=_folder(bench), name=name)
        nbytes = options.size_or(_GIB)
        given = {"nbytes": nbytes, "saves": 3 if options.quick else _FEW}
        cases = [
            _case_of(
                bench, Row(f"{what}, {where}", OURS, mode, nbytes), "runs:speed",
                name=of, compress=mode, rate=_PLACES[where], **given,
            )
            for of, what, where in ((name, _RUN, "a folder"), (name, _RUN, _FAST), (None, _NOISE, "a folder"))
            for mode in _MODES[:2]
        ]  # fmt: skip
        rows = bench.run(cases, warm_up=0)
        return bench.result("coded", "Saves that encode", list(_coded_checks(rows)), "durable", saves=given["saves"])


def _coded_checks(rows: list[Row]) -> Iterator[Check]:
    pairs = zip(rows[::2], rows[1::2], strict=True)
    for off, auto in pairs:
        time = over(auto.median("durable"), off.median("durable"))
        if auto.group.startswith(_NOISE):
            yield Check(f"{auto.group}: time, auto / off", 1.05, False, time)
            yield Check(f"{auto.group}: CPU, auto / off", 1.05, False, over(auto.median("cpu"), off.median("cpu")))
            continue
        newest = over(auto.median("newest cold"), auto.median("first cold"))
        yield Check(f"{auto.group}: CPU-seconds for each GiB of a save", 0.55, False, auto.median("cpu/GiB"))
        yield Check(f"{auto.group}: newest / first, cold load", 1.2, False, newest)
        if _FAST in auto.group:
            yield Check(f"{auto.group}: time, auto / off", 1.0, False, time)


def coding(options: Options) -> ScenarioResult:
    """Encode and decode 1 GiB of RL weights in one thread, each version alone and each against the previous one."""
    with Bench(options) as bench:
        name = next(iter(_QUICK if options.quick else _TRACES))
        bench.team().call("deltas:make", folder=_folder(bench), name=name)
        nbytes = options.size_or(_GIB)
        rows = bench.run(list(_speeds(bench, name, nbytes)))
        return bench.result("coding", "Encoding and decoding weights, one thread", _speed_checks(rows), "cpu")


def _folder(bench: Bench) -> str:
    return str(bench.options.traces)


def _case(bench: Bench, row: Row, task: str, **arguments: Any) -> Case:
    """Return a case with the same bytes in each round, so that one round is enough."""

    def run(number: int) -> Measured:
        if number:
            raise Enough
        return bench.team().measure(task, folder=_folder(bench), **arguments)

    return Case(row, run, ours=row.who == OURS)


def _versions(bench: Bench, name: str) -> Iterator[Case]:
    """Encode a run of versions, and count the bytes that loading any of them needs."""
    saves = _FEW if bench.options.quick else _SAVES
    peers = {"zstd-1": ("XOR with the one before, two alone", saves // 2),
             "zipnn": ("", 1), "dcp": ("zstd extension", 1), "raw": ("", 1)}  # fmt: skip
    yield _case(bench, Row(_RUN, OURS, ""), "versions:follow", name=name, saves=saves)
    for who, (what, each) in peers.items():
        row = Row(_RUN, who, what, limit=who == "raw")
        yield _case(bench, row, "deltas:replay", name=name, who=who, saves=saves, each=each)


def _distances(bench: Bench, name: str, about: str, steps: Sequence[int]) -> Iterator[Case]:
    """For one training run, encode weights against earlier ones, each part alone, and whole states."""
    first, last = steps[0], steps[-1]
    half = name != "gpt"
    parts = ["weights", *(["master"] if half else []), "exp_avg", "exp_avg_sq"]

    def case(group: str, who: str, what: str, *, of: Sequence[str], step: int, since: int | None = None,
             matrices: bool = True) -> Case:  # fmt: skip
        row = Row(f"{about}: {group}", who, what, limit=who == "raw")
        return _case(bench, row, "deltas:code", name=name, who=who, parts=of, step=step, since=since, matrices=matrices)

    for step in steps[1:]:
        group = f"weights, {_later(step - first)}"
        yield case(group, OURS, "deltas", of=["weights"], step=step, since=first)
        yield case(group, "zstd-1", "XOR", of=["weights"], step=step, since=first)
        yield case(group, "raw", "", of=["weights"], step=step)
    for part in parts:
        for who in (OURS, "zstd-1", "zipnn", "dcp", "raw"):
            yield case(f"{part} {_ALONE}", who, "", of=[part], step=last)
    states = {"matrices": (parts, True), "all tensors": (parts, False)}
    if half:
        states["matrices, float32"] = (parts[1:], True)
    for step in steps[2:]:
        group = _STATES + _later(step - first)
        for what, (of, matrices) in states.items():
            yield case(group, OURS, what, of=of, step=step, matrices=matrices)
            yield case(group, OURS, what + _DELTAS, of=of, step=step, since=first, matrices=matrices)
            yield case(group, "raw", what, of=of, step=step, matrices=matrices)


def _later(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''} apart"


def _checks(rows: list[Row], traces: dict[str, str]) -> list[Check]:
    rl, *others = traces.values()
    alone = [about for about in (rl, *others) if about != _TRACES["gpt"]]
    step = next(row.group for row in rows if row.group.startswith(f"{rl}: weights"))
    run, one = partial(_found, rows, _RUN, OURS, ""), partial(_found, rows, step, OURS, "deltas")
    xor = _found(rows, _RUN, "zstd-1", None, "stored")
    return [
        Check("versions of RL: share of as many copies", 0.022, False, run("share")),
        Check("... bytes of XOR and zstd-1 / casckpt", 1.54, True, over(xor, run("stored"))),
        Check("... what the last 8 need, worst, in copies", 2.2, False, run("kept worst")),
        Check("... mean", 1.6, False, run("kept mean")),
        Check("... CPU-seconds for each GB of a verified load, worst", _LOAD, False, run("load worst")),
        Check(f"{step}: share", 0.008, False, one("share")),
        Check("... over the entropy of independent changes", 1.5, False, over(one("stored"), one("bound"))),
        *(_share(rows, f"{about}: {part} {_ALONE}", "", limit) for about in alone for part, limit in _LIMITS.items()),
        *(_share(rows, f"{others[0]}: {_STATES}{_later(steps)}", what, limit)
          for steps, what, limit in _WHOLE if others),
    ]  # fmt: skip


def _share(rows: list[Row], group: str, what: str, limit: float) -> Check:
    text = f"{group}{', ' * bool(what)}{what}: share"
    return Check(text, limit, False, _found(rows, group, OURS, what, "share"))


def _found(rows: list[Row], group: str, who: str, what: str | None, metric: str) -> float | None:
    """Return a figure of the first matching row."""
    return next(
        (row.median(metric) for row in rows if (row.group, row.who) == (group, who) and what in (None, row.what)), None
    )


def _speeds(bench: Bench, name: str, nbytes: int) -> Iterator[Case]:
    for kind, coders in _KINDS.items():
        for direction in ("encode", "decode"):
            for who in coders:
                work = f"{direction} {kind}"
                arguments = {"folder": _folder(bench), "name": name, "who": who, "work": work, "nbytes": nbytes}
                yield Case(Row(work, who, "", nbytes), _measuring(bench, "deltas:speed", arguments), ours=who == OURS)


def _measuring(bench: Bench, task: str, arguments: dict[str, Any]) -> Callable[[int], Measured]:
    return lambda _: bench.team().measure(task, **arguments)


def _speed_checks(rows: list[Row]) -> list[Check]:
    """Return the targets in GB per CPU-second."""
    wanted = {"encode alone": 1.0, "decode alone": 1.8, "encode delta": 4.7, "decode delta": 11.0}
    return [
        Check(
            f"{row.group}: GB for each CPU-second", wanted[row.group], True, over(row.nbytes / 1e9, row.median("cpu"))
        )
        for row in rows
        if row.who == OURS
    ]
