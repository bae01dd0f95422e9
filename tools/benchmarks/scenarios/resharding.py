"""Loads on different numbers of ranks than those that saved, in real gloo process groups.

If there are more ranks than cores, the ranks take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Case
from benchmarks.measure import Measured
from benchmarks.peers.base import RANKS, Peer, Setting
from benchmarks.results import OURS, Check, Row, ScenarioResult, best, median_of, over
from benchmarks.scenarios.base import READERS, Bench, Options
from benchmarks.scenarios.loading import WARM
from benchmarks.scenarios.saving import time_of
from benchmarks.teams import Team

_USUAL = 256 << 20  # 8192 x 8192 in float32
_ROWS, _COLUMNS = "rows", "columns"
_ONE = "1 thread"
_SLOW = "olmo-0.1.0"  # the time to load columns is quadratic in the number of rows


@dataclass(frozen=True)
class Move:
    """A change of the number of ranks and the sharding. ``form``: small, or the requested size."""

    source: int
    saved: str
    target: int
    loaded: str
    form: str = "square"

    @property
    def name(self) -> str:
        """Return the name of the group of rows."""
        small = ", 2048 x 64" if self.form == "narrow" else ""
        return f"{self.source} {self.saved} to {self.target} {self.loaded}{small}"

    @property
    def is_flat(self) -> bool:
        """Return whether every shard is a single range of the whole matrix."""
        return (self.saved, self.loaded) == (_ROWS, _ROWS)


HARDEST = Move(4, _COLUMNS, 2, _ROWS)
MOVES = (
    Move(4, _ROWS, 2, _ROWS),
    HARDEST,
    Move(2, _ROWS, 4, _COLUMNS),
    Move(2, _COLUMNS, 4, _COLUMNS),
)
_TINY = Move(4, _COLUMNS, 2, _ROWS, "narrow")


def reshard(options: Options) -> ScenarioResult:
    """Let every rank load its shard of a matrix.

    The time is the time of the slowest rank. Files are in the page cache.
    """
    moves = [*MOVES, *([_TINY] if any(peer.name == _SLOW for peer in options.peers) else [])]
    with Bench(options) as bench:
        size = options.size_or(_USUAL, quick=1 << 20)
        whole = bench.make_state("whole", "square", size)
        for ranks, shard, form in sorted({one for move in moves for one in _states(move)}):
            dim = 0 if shard == _ROWS else 1
            bench.make_state(f"{form} {shard}", form, size, ranks=ranks, shard=dim, seed=1)
        rows = bench.run([*_plain_reads(bench, whole), *_all_loads(bench, moves, whole)])
        title = "Load by other ranks than saved"
        return bench.result("reshard", title, _checks(rows, moves), bytes=whole)


def _states(move: Move) -> Sequence[tuple[int, str, str]]:
    return (move.source, move.saved, move.form), (move.target, move.loaded, move.form)


def _checks(rows: list[Row], moves: Sequence[Move]) -> list[Check]:
    checks = [
        Check(f"{move.name}: DCP / casckpt", 3.0, True,
              over(time_of(rows, "dcp", group=move.name), time_of(_verified(rows), OURS, group=move.name)))
        for move in moves
    ]  # fmt: skip
    hardest = median_of(best(_verified(rows), OURS, "durable", group=HARDEST.name), "durable")
    plain = over(hardest, median_of(best(rows, "raw preadv", "durable", what=_ONE), "durable"))
    return [*checks, Check(f"{HARDEST.name}: casckpt, verified / plain read of the file", 3.0, False, plain)]


def _verified(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "verify=no" not in row.what]


def _plain_reads(bench: Bench, size: int) -> list[Case]:
    place = bench.place()
    bench.team().call("limits:put_state", folder=place, state="whole")
    more: dict[str, Any] = {"state": "whole", "folder": place, "cache": WARM, "group": "plain read", "nbytes": size}
    threads = {_ONE: 1} | {f"{n} threads": n for n in READERS}
    return [bench.limit("raw preadv", what, "limits:read", threads=n, **more) for what, n in threads.items()]


def _all_loads(bench: Bench, moves: Sequence[Move], size: int) -> list[Case]:
    saved: dict[tuple[str, str, int, str, str], str] = {}
    return [case for move in moves for case in _loads(bench, move, size, saved)]


def _loads(bench: Bench, move: Move, size: int, saved: dict[tuple[str, str, int, str, str], str]) -> list[Case]:
    def key(peer: type[Peer], setting: Setting) -> tuple[str, str, int, str, str]:
        return peer.name, str(setting), move.source, move.saved, move.form

    def prepare(peer: type[Peer], setting: Setting, _: Team) -> None:
        if key(peer, setting) not in saved:
            place = bench.place()
            state = f"{move.form} {move.saved}"
            team = bench.team(peer.environment, move.source)
            team.call("storing:save", peer=peer.name, setting=setting, state=state, folder=place)
            saved[key(peer, setting)] = place

    def run(peer: type[Peer], setting: Setting, team: Team, _: int) -> Measured:
        place, state = saved[key(peer, setting)], f"{move.form} {move.loaded}"
        job = {"peer": peer.name, "setting": setting, "state": state, "folder": place, "cache": WARM}
        return team.measure("storing:load", **job)

    def fits(peer: type[Peer], _: Setting) -> bool:
        return peer.name != _SLOW or move.is_flat or move.form == "narrow"

    nbytes = size if move.form == "square" else 2048 * 64 * 4
    return bench.cases(RANKS, run, group=move.name, nbytes=nbytes, ranks=move.target, prepare=prepare, only=fits)
