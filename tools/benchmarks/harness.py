"""Interleaved rounds: A B C, B C A, C A B. If the machine is slow for a while, this affects all cases equally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.environments import Absent
from benchmarks.measure import Measured
from benchmarks.results import Row
from benchmarks.teams import CallFailed

Tell = Callable[[str], None]


class Void(Exception):
    """The benchmark is void because a load returned incorrect bytes or casckpt itself failed."""


class Enough(Exception):
    """A case does not need more rounds. The finished rounds count."""


@dataclass
class Case:
    """A row to measure. ``run`` performs the round with the given number. ``ours``: a failure ends the run."""

    row: Row
    run: Callable[[int], Measured]
    ours: bool = False


def run_rounds(cases: Sequence[Case], rounds: int, tell: Tell, *, warm_up: int = 1) -> list[Row]:
    """Run all cases ``rounds`` times, in an order that rotates. The first ``warm_up`` rounds do not count.

    If a peer fails, it is skipped from then on, and its row states the reason. Raises `Void`.
    """
    over: set[int] = set()
    for number in range(rounds + warm_up):
        for place in range(len(cases)):
            which = (place + number) % len(cases)
            if which in over:
                continue
            case = cases[which]
            tell(f"{'warm-up' if number < warm_up else f'round {number - warm_up + 1} of {rounds}'}: {case.row.name}")
            try:
                measured = _attempt(case, number)
            except Enough:
                over.add(which)
                continue
            if measured is None:
                over.add(which)
                case.row.rounds.clear()
            elif number >= warm_up:
                case.row.rounds.append(measured)
    for case in cases:
        case.row.summarise()
    return [case.row for case in cases]


def _attempt(case: Case, number: int) -> Measured | None:
    try:
        return case.run(number)
    except Absent as error:
        case.row.note = f"absent: {error}"
    except CallFailed as error:
        skipped = error.kind in ("NotCold", "Skipped", "Absent")
        if error.kind == "WrongBytes" or (case.ours and not skipped):
            raise Void(f"{case.row.name}: {error}") from error
        case.row.note = f"absent: {error.text}" if skipped else f"failed: {error}"
    return None
