"""Loads by one process: everything or an eighth of every tensor, from the page cache or from the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.base import DCP_LOAD, DCP_PART, FROM_BUCKET, LOAD, MAPPED, PART, Peer, Setting
from benchmarks.results import OURS, Check, Row, ScenarioResult, best, median_of, over
from benchmarks.scenarios.base import DISK, READERS, Bench, Options
from benchmarks.scenarios.saving import HASHES, raw_hashes, reached, time_of
from benchmarks.teams import Team

_STATE = "state"
_USUAL = 3 << 29  # 1.5 GiB
_EIGHTH = 3
_CELL = 1 << 20
WARM, COLD, USED = "warm", "cold", "second use"
_RAW, _BOTH = "raw read", "read and BLAKE3"
_PARTS = (PART, DCP_PART)
_TASKS = dict.fromkeys((LOAD, MAPPED, DCP_LOAD, FROM_BUCKET), "storing:load") | dict.fromkeys(
    _PARTS, "storing:load_part"
)


def load(options: Options) -> ScenarioResult:
    """Measure a full load into memory that is allocated and touched."""
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "model", options.size_or(_USUAL))
        hashes = [raw_hashes(bench, size, group) for group in (WARM, COLD)]
        ways = [case for group in (WARM, COLD) for case in bench.ways(_STATE, size, group, to_gpu=True)]
        limits = [*raw_reads(bench, size), *bench.disk("read", size, COLD), *hashes, *ways]
        rows = _bounded(bench.run([*loads(bench, LOAD, size), *limits]), cold=DISK)
        mapped = loads(bench, MAPPED, size, groups=(USED,)) if options.device == "cpu" else []
        checks = [*_load_checks(rows), _mapped_check(bench.run(mapped))]
        return bench.result("load", "Full load, one process", checks, bytes=size)


def _mapped_check(rows: list[Row]) -> Check:
    peer, ours = (time_of(rows, who, group=USED) for who in ("safetensors", OURS))
    return Check("mapped, second use: safetensors / casckpt", 0.95, True, over(peer, ours))


def _load_checks(rows: list[Row]) -> list[Check]:
    plain, checked = (our_time(rows, COLD, verify=verify) for verify in (False, True))
    return [
        Check("warm, not verified: raw read / casckpt", 0.9, True, reached(rows, our_row(rows, WARM, verify=False))),
        Check("warm, verified: casckpt / read and BLAKE3", 1.15, False,
              over(our_time(rows, WARM, verify=True), time_of(rows, _BOTH, group=WARM))),
        Check("cold: casckpt verified / not verified", 1.05, False, over(checked, plain)),
        Check("or cold, verified: raw BLAKE3 / casckpt", 0.9, True, over(time_of(rows, HASHES, group=COLD), checked)),
    ]  # fmt: skip


def _bounded(rows: list[Row], *, cold: str) -> list[Row]:
    """Set the limits of a load: reading or, with verification, reading and hashing in one pass from memory."""
    for row in (row for row in rows if not row.limit):
        row.bounds = [_RAW] if row.group == WARM else [cold]
        if row.verified:
            row.bounds = [_BOTH] if row.group == WARM else [cold, HASHES]
    return rows


def partial(options: Options) -> ScenarioResult:
    """Load an eighth of every tensor along its first dimension, as one of eight ranks would."""
    with Bench(options) as bench:
        size = bench.make_state(_STATE, "model", options.size_or(_USUAL))
        cases = [*loads(bench, PART, size // 8), *raw_reads(bench, size // 8, eighth=_EIGHTH)]
        rows = _bounded(bench.run(cases), cold=_RAW)
        plain, checked = (our_row(rows, COLD, verify=verify) for verify in (False, True))
        kept = best(rows, OURS, "durable", group=WARM, what="kept")
        checks = [
            Check("bytes read / bytes wanted, not verified", 1.05, False, read_factor(plain)),
            Check("cells of 1 MiB read beyond what is wanted, for each tensor, verified", 2.0, False, excess(checked)),
            Check("warm, verified, the store open: casckpt / read and BLAKE3", 1.3, False,
                  over(median_of(kept, "durable"), time_of(rows, _BOTH, group=WARM))),
        ]  # fmt: skip
        return bench.result("partial", "Load of one eighth of every tensor (dimension 0)", checks, bytes=size // 8)


def read_factor(row: Row | None) -> float | None:
    """Return the requested bytes divided by the needed bytes."""
    return over(row.median("bytes_asked"), row.median("bytes_wanted")) if row else None


def excess(row: Row | None) -> float | None:
    """Count unnecessarily read cells: verification may read an additional cell at each end of a tensor's range."""
    asked, wanted, ranges = (median_of(row, name) for name in ("bytes_asked", "bytes_wanted", "ranges"))
    if asked is None or wanted is None or not ranges:
        return None
    return (asked - wanted) / _CELL / ranges


def our_row(rows: list[Row], group: str, *, verify: bool) -> Row | None:
    """Return casckpt's best row in a group."""
    found = [row for row in rows if row.who == OURS and row.group == group and ("verify=no" not in row.what) is verify]
    return best(found, OURS, "durable")


def our_time(rows: list[Row], group: str, *, verify: bool) -> float | None:
    """Return the median time of that row."""
    return median_of(our_row(rows, group, verify=verify), "durable")


def loads(
    bench: Bench, work: str, size: int, *, state: str = _STATE, groups: tuple[str, ...] = (WARM, COLD)
) -> list[Case]:
    """Measure warm, cold and second loads of a checkpoint that each peer has saved beforehand."""
    saved: dict[str, str] = {}

    def key(peer: type[Peer], setting: Setting) -> str:
        return f"{peer.name} {peer.as_saved(setting)}"

    def prepare(peer: type[Peer], setting: Setting, team: Team) -> None:
        if key(peer, setting) not in saved:
            place = bench.place()
            team.call("storing:save", peer=peer.name, setting=peer.as_saved(setting), state=state, folder=place)
            saved[key(peer, setting)] = place

    def runner(cache: str) -> Callable[[type[Peer], Setting, Team, int], Measured]:
        def run(peer: type[Peer], setting: Setting, team: Team, _: int) -> Measured:
            place = saved[key(peer, setting)]
            more: dict[str, Any] = {"eighth": _EIGHTH} if work in _PARTS else {}
            job = {"peer": peer.name, "setting": setting, "state": state, "folder": place, "cache": cache}
            return team.measure(_TASKS[work], **job, **more)

        return run

    return [
        case
        for group in groups
        for case in bench.cases(work, runner(group), group=group, nbytes=size, prepare=prepare)
    ]  # fmt: skip


def raw_reads(bench: Bench, size: int, *, eighth: int | None = None) -> list[Case]:
    """Measure the limits of reads by threads: warm, and cold if hashed or in parts. For others, see `Bench.disk`."""
    place = bench.place()
    bench.team().call("limits:put_state", folder=place, state=_STATE)
    more: dict[str, Any] = {"state": _STATE, "folder": place, "eighth": eighth}
    return [
        bench.limit(who, f"preadv, {n} threads", "limits:read", group=cache, nbytes=size, threads=n, cache=cache,
                    hashed=hashed, **more)
        for cache in (WARM, COLD)
        for who, hashed in ((_RAW, False), (_BOTH, True))
        for n in bench.several(READERS)
        if cache == WARM or hashed or eighth is not None
    ]  # fmt: skip
