"""A rank is stopped or killed at each of its calls to gloo. All other ranks name it, and none waits too long."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from casckpt.errors import RankFailed
from casckpt.ranks import ranks as module
from casckpt.ranks import waiting, wire
from casckpt.ranks.ranks import open_ranks
from tests.support.ranks import Pool, outcome_of, tell, total, wait_for

pytestmark = pytest.mark.kill

SHORT = 3.0  # seconds until rank 0 gives up on a rank
SLACK = 20.0  # seconds that a busy machine may add
SIGNALS = {"SIGSTOP": signal.SIGSTOP, "SIGKILL": signal.SIGKILL}


PHASES = ("connect", "exchange")


@dataclass(frozen=True)
class Strike:
    """A signal that the rank ``who`` receives at its call ``at`` to gloo in a phase."""

    name: str
    who: int = 0
    phase: str = ""
    at: int = 0


class _Points:
    """Counts the calls in each phase, and strikes its process at one of them."""

    def __init__(self, strike: Strike | None) -> None:
        self.counts = dict.fromkeys(PHASES, 0)
        self.now: str | None = None
        self._strike = strike

    def __call__(self) -> None:
        if self.now is not None:
            self.counts[self.now] += 1
            strike = self._strike
            if strike is not None and (strike.phase, strike.at) == (self.now, self.counts[self.now]):
                os.kill(os.getpid(), SIGNALS[strike.name])


class _Watched:
    """An object whose named methods are points. So are those of the objects that they return."""

    def __init__(self, real: Any, point: Callable[[], None], *names: str) -> None:
        self._real, self._point, self._names = real, point, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in self._names:
            return found

        def call(*args: Any) -> Any:
            self._point()
            made = found(*args)
            return made if isinstance(made, bool) else _Watched(made, self._point, *self._names)

        return call


class _Gloo:
    """The counterpart of torch's ProcessGroupGloo, for groups whose calls are points."""

    def __init__(self, point: Callable[[], None], *, on_demand: bool) -> None:
        self._real, self._point, self._on_demand = torch.distributed.ProcessGroupGloo, point, on_demand

    def __getattr__(self, name: str) -> Any:
        if not self._on_demand and name.startswith("create_"):
            raise AttributeError(name)
        return getattr(self._real, name)

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> Any:
        if size == 1:
            return self._real(store, rank, size, options)
        self._point()
        return _Watched(self._real(store, rank, size, options), self._point, "send", "recv", "wait")


def struck(rank: int, size: int, strike: Strike, *, on_demand: bool = True) -> Any:
    """Connect and exchange. One rank is struck at one of its calls, and continues when the others have given up.

    Return the error, the seconds until then, the result of a later exchange, and the number of calls in each phase.
    """
    module.MARGIN, wire.WORD_SECONDS, waiting.HEARD_SECONDS = timedelta(seconds=SHORT), 1, 1
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    who, point = strike.who, _Points(strike if rank == strike.who else None)
    real, begun = torch.distributed.ProcessGroupGloo, monotonic()
    torch.distributed.ProcessGroupGloo = _Gloo(point, on_demand=on_demand)  # type: ignore[misc,assignment]
    try:
        error = outcome_of(lambda: _use(point))
    finally:
        torch.distributed.ProcessGroupGloo = real  # type: ignore[misc]
    point.now = None
    if error is None:
        error = outcome_of(lambda: total(open_ranks()))
    seconds, again = monotonic() - begun, None
    if strike.name == "SIGSTOP":
        others = [other for other in range(size) if other != who]
        tell(f"given up {rank}")
        if rank == others[0]:
            for other in others:
                wait_for(f"given up {other}")
            os.kill(int(Path(f"pid-{who}").read_text()), signal.SIGCONT)
        wait_for(f"given up {who}")
        again = outcome_of(lambda: total(open_ranks()))
    return error, seconds, again, point.counts


def _use(point: _Points) -> None:
    point.now = "connect"
    ranks = open_ranks()
    point.now = "exchange"
    total(ranks)


def check_struck(pool: Pool, size: int, strike: Strike, **options: Any) -> None:
    """Strike a rank. All other ranks must name it in time."""
    outcomes = pool.outcomes(size, struck, strike, timeout=SHORT, **options)
    struck_one = outcomes[strike.who]
    if struck_one.ok and struck_one.value[-1][strike.phase] < strike.at:
        return  # it made fewer calls this time, because it sent fewer signs of life
    for rank, outcome in enumerate(outcomes):
        where = (size, strike, rank, outcome)
        if rank == strike.who and strike.name == "SIGKILL":
            assert outcome.died == -9, where
            continue
        assert outcome.ok, where
        error, seconds, again, _ = outcome.value
        assert isinstance(error, RankFailed), where
        assert error.rank == strike.who, where
        if rank != strike.who:
            assert seconds < 4.5 * SHORT + SLACK, where
        if strike.name == "SIGSTOP":
            assert again == sum(range(size)), where


def points_of(pool: Pool, size: int) -> list[dict[str, int]]:
    """Return the number of calls to gloo in each phase, on each rank."""
    found = pool.run(size, struck, Strike("SIGKILL"))
    assert all(error == sum(range(size)) for error, *_ in found)
    return [counts for *_, counts in found]


@pytest.mark.parametrize(
    ("size", "strike"),
    [
        (3, Strike("SIGSTOP", 2, "connect", 2)),
        (3, Strike("SIGKILL", 2, "connect", 2)),
        (4, Strike("SIGSTOP", 0, "exchange", 2)),
        (4, Strike("SIGSTOP", 2, "exchange", 2)),
        (3, Strike("SIGKILL", 1, "exchange", 2)),
    ],
    ids=lambda value: f"{value.name} of {value.who} in {value.phase}" if isinstance(value, Strike) else str(value),
)
def test_a_rank_that_stops_or_dies_is_named(ranks: Pool, size: int, strike: Strike) -> None:
    check_struck(ranks, size, strike)


@pytest.mark.soak
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize(("size", "who"), [(size, who) for size in (2, 3, 4) for who in range(size)])
def test_a_rank_that_stops_or_dies_at_any_call_is_named(ranks: Pool, size: int, who: int, name: str) -> None:
    for phase, count in points_of(ranks, size)[who].items():
        assert count
        for at in range(1, count + 1):
            check_struck(ranks, size, Strike(name, who, phase, at), tcp=at % 2 == 0)
