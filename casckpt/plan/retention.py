"""Retention: which checkpoints a policy forgets. Pure: no storage, no clock.

A policy is a union of rules, applied to each run by itself; a checkpoint that any rule keeps is kept. Whatever the
rules say, the newest checkpoint of a run and every tagged one stay. "Newest" is by transaction, not by step: a run that
was rolled back goes on from its latest save.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from casckpt.errors import InvalidInput
from casckpt.format.names import TxId

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION_RE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw])")


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``15m``, ``12h``, ``7d`` or ``2w``. Raises InvalidInput for anything else."""
    found = _DURATION_RE.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"{text[:40]!r} is not a duration: give a number and a unit, as 90s, 15m, 12h, 7d or 2w")
    return float(found[1]) * _SECONDS[found[2]]


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep of each run: any of its rules is enough. Nothing set forgets nothing.

    ``keep_last``: that many of the newest. ``keep_every``: those whose step is a multiple of it.
    ``keep_within_seconds``: those created at most that long ago. Raises InvalidInput for numbers that make no sense.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 0):
            raise InvalidInput(f"keep-last {self.keep_last!r}: give a number of checkpoints, 1 or more")
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise InvalidInput(f"keep-every {self.keep_every!r}: give a number of steps, 1 or more")
        within = self.keep_within_seconds
        if within is not None and not _is_duration(within):
            raise InvalidInput(f"keep-within {within!r} seconds: give a duration, as 12h or 7d")
        if self.keep_last == 0 and self.keep_every is None and within is None:
            raise InvalidInput(
                "keep-last 0 would keep nothing, but the newest of a run always stays: give 1, or name what to forget"
            )

    @property
    def is_empty(self) -> bool:
        """Does it say nothing at all? Then it forgets nothing."""
        return self == Policy()


def _is_duration(seconds: Any) -> bool:
    return isinstance(seconds, int | float) and isfinite(seconds) and seconds >= 0


@dataclass(frozen=True, slots=True)
class Kept:
    """A visible checkpoint as a policy sees it. ``created_at``: microseconds since the epoch."""

    txid: TxId
    run: str
    step: int
    created_at: int


def plan_forget(
    visible: Iterable[Kept], policy: Policy, now: int, *, tagged: Container[TxId] = (), run: str | None = None
) -> list[Kept]:
    """What ``policy`` forgets of the ``visible`` checkpoints of a store at ``now`` (microseconds), oldest first.

    Twins (the same run and step, twice) that a later transaction superseded are forgotten by every policy and count
    for no rule. ``tagged`` ones are never chosen. ``run`` limits it to that run.
    """
    if policy.is_empty:
        return []
    by_run: dict[str, list[Kept]] = defaultdict(list)
    for one in sorted(visible, key=lambda kept: kept.txid):
        if run is None or one.run == run:
            by_run[one.run].append(one)
    chosen = [one for group in by_run.values() for one in _forget_of_run(group, policy, now)]
    return sorted((one for one in chosen if one.txid not in tagged), key=lambda kept: kept.txid)


def _forget_of_run(group: list[Kept], policy: Policy, now: int) -> list[Kept]:
    """``group``: of one run, oldest first."""
    current = list({one.step: one for one in group}.values())  # of twins, the last one answers
    current.sort(key=lambda kept: kept.txid)
    last = max(policy.keep_last or 0, 1)
    keep = {one.txid for one in current[-last:]}
    keep.update(one.txid for one in current if _kept_by_rule(one, policy, now))
    return [one for one in group if one.txid not in keep]


def _kept_by_rule(one: Kept, policy: Policy, now: int) -> bool:
    if policy.keep_every is not None and one.step % policy.keep_every == 0:
        return True
    within = policy.keep_within_seconds
    return within is not None and now - one.created_at <= within * 1_000_000
