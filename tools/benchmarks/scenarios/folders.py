"""Folders of another program: a checkpoint of a trainer, and its next one, beside programs that store folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.environments import Absent, program, version_of
from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.programs import COPY, SETTINGS
from benchmarks.results import OURS, Check, Row, ScenarioResult, over
from benchmarks.scenarios.base import Bench, Options, described
from benchmarks.scenarios.loading import WARM
from benchmarks.scenarios.saving import reached, time_of
from benchmarks.tasks.folders import VERSIONS

_USUAL = 1 << 30
_HASHES = "read and BLAKE3"
_OURS: tuple[dict[str, Any], ...] = ({}, {"compress": "auto"})
_PROGRAMS = [who for who in SETTINGS if who != COPY]
_TO_BEAT = ("restic", "borg")


def folders(options: Options) -> ScenarioResult:
    """Store the first version of a folder in an empty store or repository, and then the next version.

    Both are in the page cache. The rows of programs that are not installed say so.
    """
    with Bench(options) as bench:
        folder, paths = bench.place(), {who: _path(who, options) for who in _PROGRAMS}
        try:
            sizes = bench.team().call("folders:make", folder=folder, size=options.size_or(_USUAL))[0]
            rows = bench.run(list(_cases(bench, folder, sizes, paths)))
        finally:
            bench.team().call("storing:delete", folder=folder)
        versions = {who: version_of(path) for who, path in paths.items() if isinstance(path, str)}
        title = "A folder of a trainer, and its next version"
        return bench.result("files", title, list(_checks(rows)), bytes=sizes[VERSIONS[0]], **versions)


def _path(who: str, options: Options) -> str | Absent:
    try:
        return program(who, create=not options.quick)
    except Absent as error:
        return error


def _cases(bench: Bench, folder: str, sizes: dict[str, int], paths: dict[str, str | Absent]) -> Iterator[Case]:
    job: dict[str, Any]
    for peer in bench.ours():
        for setting in _OURS:
            job = {"task": "folders:by_casckpt", "folder": folder, "setting": setting}
            run = partial(_stored, bench, peer.environment, job)
            yield from _both(Row("", peer.name, described(setting), bounds=[COPY, _HASHES]), run, sizes)
    for who, settings in SETTINGS.items():
        for what in settings:
            job = {"task": "folders:by_program", "folder": folder, "who": who, "what": what, "path": paths.get(who)}
            yield from _both(Row("", who, what, limit=who == COPY), partial(_stored, bench, "", job), sizes)
    for version, nbytes in sizes.items():
        files = {"folder": str(Path(folder, version)), "cache": WARM}
        yield bench.limit(_HASHES, "all cores", "limits:read_and_hash", group=version, nbytes=nbytes, **files)


def _stored(bench: Bench, environment: str, job: dict[str, Any]) -> list[Measured]:
    """Store both versions, in a new place that is removed afterward. Return the cost of each."""
    if isinstance(job.get("path"), Absent):
        raise job["path"]
    place = bench.place()
    try:
        return [Measured(**one) for one in bench.team(environment).call(**job, place=place)[0]]
    finally:
        bench.team().call("storing:delete", folder=place)


def _both(row: Row, run: Callable[[], list[Measured]], sizes: dict[str, int]) -> Iterator[Case]:
    """Return a case for each version. Whichever is first in a round stores both."""
    in_round = cache(lambda _: run())

    def one(index: int, number: int) -> Measured:
        return in_round(number)[index]

    for index, (version, nbytes) in enumerate(sizes.items()):
        own = replace(row, group=version, nbytes=nbytes, rounds=[], summary={})
        yield Case(own, partial(one, index), ours=row.who == OURS)


def _checks(rows: list[Row]) -> Iterator[Check]:
    for version in VERSIONS:
        ours = next(row for row in rows if (row.group, row.who) == (version, OURS))
        yield Check(f"{version}: the slower of {COPY}, {_HASHES} / casckpt", 0.9, True, reached(rows, ours))
        for who in _TO_BEAT:
            ratio = over(time_of(rows, who, group=version), ours.median("durable"))
            yield Check(f"{version}: {who} / casckpt", 1.0, True, ratio)
