"""What encodings and deltas save, of states that real trainings made, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.harness import Case, Enough
from benchmarks.measure import Measured
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options
from benchmarks.traces import default_folder

_TRACES = {"rl": "RL, 1e-6", "ft": "fine-tuning, 2e-5", "gpt": "from scratch, 6e-4"}
_QUICK = {"quick": "smoke run"}
_SAVES, _WHOLE_EACH = 64, 32
_GIB = 1 << 30
_LIMITS = {"weights": 0.68, "master": 0.845, "exp_avg": 0.845, "exp_avg_sq": 0.81}  # of planes, each part
_RUN, _STEP, _EACH, _STATES = "64 versions of RL", "weights, {} later", "each part by itself", "whole states, {} later"


def deltas(options: Options) -> ScenarioResult:
    """Bytes of matrices of encoders, but for whole states; all is decoded and compared.

    Traces are made by trainings of some minutes, and kept.
    """
    with Bench(options) as bench:
        traces = _QUICK if options.quick else _TRACES
        steps = {name: bench.team().call("deltas:make", folder=_folder(bench), name=name)[0] for name in traces}
        cases = [*_versions(bench, next(iter(traces)))]
        for name, about in traces.items():
            cases += _distances(bench, name, about, steps[name])
        rows = bench.run(cases, warm_up=0)
        return bench.result("deltas", "States of real trainings, coded", _checks(rows, traces), "stored")


def coding(options: Options) -> ScenarioResult:
    """One thread encodes and decodes 1 GiB of weights of RL: each version alone, and since the one before."""
    with Bench(options) as bench:
        name = next(iter(_QUICK if options.quick else _TRACES))
        bench.team().call("deltas:make", folder=_folder(bench), name=name)
        nbytes = options.size_or(_GIB)
        rows = bench.run(list(_speeds(bench, name, nbytes)))
        return bench.result("coding", "Encoding and decoding weights, one thread", _speed_checks(rows), "cpu")


def _folder(bench: Bench) -> str:
    return str(bench.options.traces or default_folder())


def _case(bench: Bench, row: Row, task: str, **arguments: Any) -> Case:
    """Its bytes are the same in each round, so there is one."""

    def run(number: int) -> Measured:
        if number:
            raise Enough
        return bench.team().measure(f"deltas:{task}", folder=_folder(bench), **arguments)

    return Case(row, run, ours=row.who == OURS)


def _versions(bench: Bench, name: str) -> Iterator[Case]:
    """A run of versions, with all that it takes to load any of them."""
    peers = {"zstd-1": (f"XOR with the one before, each {_WHOLE_EACH}th alone", _WHOLE_EACH),
             "zipnn": ("", 1), "dcp": ("zstd extension", 1), "raw": ("", 1)}  # fmt: skip
    yield _case(bench, Row(_RUN, OURS, ""), "follow", name=name, saves=_SAVES)
    for who, (what, each) in peers.items():
        row = Row(_RUN, who, what, limit=who == "raw")
        yield _case(bench, row, "replay", name=name, who=who, saves=_SAVES, each=each)


def _distances(bench: Bench, name: str, about: str, steps: Sequence[int]) -> Iterator[Case]:
    """Of one training: the weights since earlier ones, each part alone, and whole states."""
    first, last = steps[0], steps[-1]
    half = name != "gpt"
    parts = ["weights", *(["master"] if half else []), "exp_avg", "exp_avg_sq"]

    def case(group: str, who: str, what: str, *, of: Sequence[str], step: int, since: int | None = None,
             matrices: bool = True) -> Case:  # fmt: skip
        row = Row(f"{about}: {group}", who, what, limit=who == "raw")
        return _case(bench, row, "code", name=name, who=who, parts=of, step=step, since=since, matrices=matrices)

    for step in steps[1:]:
        group = _STEP.format(step - first)
        yield case(group, OURS, "deltas", of=["weights"], step=step, since=first)
        yield case(group, "zstd-1", "XOR", of=["weights"], step=step, since=first)
        yield case(group, "raw", "", of=["weights"], step=step)
    for part in parts:
        for who in (OURS, "zstd-1", "zipnn", "dcp", "raw"):
            yield case(_EACH, who, part, of=[part], step=last)
    for step in steps[2:]:
        group = _STATES.format(step - first)
        for where, matrices in (("matrices", True), ("all tensors", False)):
            yield case(group, OURS, where, of=parts, step=step, matrices=matrices)
            yield case(group, OURS, f"{where}, deltas of weights", of=parts, step=step, since=first, matrices=matrices)
            yield case(group, "raw", where, of=parts, step=step, matrices=matrices)


def _checks(rows: list[Row], traces: dict[str, str]) -> list[Check]:
    find = _finder(rows)
    rl, *others = traces.values()
    checks = [
        Check("64 versions of RL: share of as many copies", 0.022, False, _share(rows, _RUN, "", "")),
        Check("... against XOR and zstd-1", 1, True, over(find(_RUN, "zstd-1"), find(_RUN, OURS))),
        Check("... what the last 8 need, worst, in copies", 2.2, False, _extra(rows, "kept worst")),
        Check("... and mean", 1.6, False, _extra(rows, "kept mean")),
        Check("... CPU of a load, over that of a raw one, mean", 2, False, find(_RUN, OURS, metric="load mean")),
    ]
    one = next(row for row in rows if row.group.startswith(f"{rl}: weights") and row.who == OURS)
    checks += [
        Check("RL, one step: share", 0.008, False, _share(rows, one.group, one.what, "")),
        Check("... over the entropy of independent changes", 1.5, False, over(one.median("stored"), one.median("bound"))),
    ]
    for about in (rl, *others[:1]):
        checks += [
            Check(f"{about}: {part} in planes", limit, False, _share(rows, f"{about}: {_EACH}", part, part))
            for part, limit in _LIMITS.items()
        ]
    return checks


def _speeds(bench: Bench, name: str, nbytes: int) -> Iterator[Case]:
    works = {"planes": (OURS, "zstd-1", "zipnn", "dcp"), "delta": (OURS, "zstd-1")}
    for work, coders in works.items():
        for direction in ("encode", "decode"):
            for who in coders:
                yield _timed(bench, Row(f"{direction} {work}", who, "", nbytes), name, f"{direction} {work}")
