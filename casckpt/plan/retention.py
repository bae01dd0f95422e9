"""Retention: which checkpoints a policy forgets. Pure: no storage, no clock.

A policy is a union of rules, applied to each run by itself; a checkpoint that any rule keeps is kept. Whatever the
rules say, the newest checkpoint of a run stays, the newest that nobody called unhealthy, and every tagged one. "Newest"
is by time of the save, not by step: a run that was rolled back goes on from its latest save.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from math import isnan, nan
from typing import Any, Self, TypedDict

from casckpt.base.durations import Duration, seconds_of
from casckpt.base.groups import grouped
from casckpt.errors import InvalidInput
from casckpt.format.names import TxId

MAX_PATTERNS = 1 << 14
_NUMBER = re.compile("[1-9][0-9]{0,8}")
_CALENDAR = {"keep_daily": "%Y-%m-%d", "keep_weekly": "%G-%V", "keep_monthly": "%Y-%m"}  # of UTC; %V: weeks of ISO 8601


@dataclass(frozen=True, slots=True)
class Best:
    """The ``count`` best by ``metric``: those with the least of it, or with the most."""

    metric: str
    count: int
    is_max: bool = False

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Return what NAME:N, NAME:min:N or NAME:max:N means. Raises InvalidInput."""
        name, _, number = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        metric, _, way = name.rpartition(":")
        if way not in ("min", "max") or not metric:
            metric, way = name, "min"
        if not metric or not _NUMBER.fullmatch(number):
            raise InvalidInput(f'keep-best {text!r:.120}: give a metric and a number, as "loss:3" or "acc:max:1"')
        return cls(metric, int(number), way == "max")

    def of(self, current: Iterable[RetentionCandidate]) -> list[RetentionCandidate]:
        """Return the best of these, which are oldest first; all of them if none has the metric: any may be the best."""
        known = [one for one in current if self.is_known_of(one)]
        if not known:
            return list(current)
        return sorted(known, key=lambda one: one.metrics[self.metric] * (-1 if self.is_max else 1))[: self.count]

    def is_known_of(self, one: RetentionCandidate) -> bool:
        """Tell whether a checkpoint has a number for the metric."""
        return not isnan(one.metrics.get(self.metric, nan))


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep of each run: any of its rules is enough. Nothing set forgets nothing.

    ``keep_last``: that many of the newest. ``keep_every``: those whose step is a multiple of it. ``keep_within``: those
    created at most that long ago ("7d", or a timedelta). ``keep_daily``, ``keep_weekly``, ``keep_monthly``: the newest
    of each of so many last days, weeks (from Monday) and months, in UTC, in which any was created. ``keep_best``:
    "loss:3", the three with the least of this metric, "acc:max:1", the one with the most; or several of these. Of equal
    ones those saved first; none without the metric, or where it is NaN, but all as long as the whole run is without it.
    Raises InvalidInput for what makes no sense.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: Duration | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    keep_best: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 0):
            raise InvalidInput(f"keep-last {self.keep_last!r}: give a number of checkpoints, 1 or more")
        for rule in ("keep_every", *_CALENDAR):
            number = getattr(self, rule)
            if number is not None and (type(number) is not int or number < 1):
                raise InvalidInput(f"{rule.replace('_', '-')} {number!r}: give a number, 1 or more")
        if self.keep_within is not None:
            seconds_of(self.keep_within, "keep-within")
        if not self.best:  # as of an option that may be repeated
            object.__setattr__(self, "keep_best", None)
        if self.keep_last == 0 and replace(self, keep_last=None).is_empty:
            raise InvalidInput(
                "keep-last 0 would keep nothing, but the newest of a run always stays: give 1, or name what to forget"
            )

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing at all, and so forgets nothing."""
        return all(getattr(self, rule.name) is None for rule in fields(self))

    @property
    def best(self) -> list[Best]:
        """``keep_best`` as it is meant. Raises InvalidInput."""
        given = self.keep_best if isinstance(self.keep_best, list | tuple) else [self.keep_best]
        return [Best.parse(one) for one in given if one is not None]

    @property
    def within_seconds(self) -> float | None:
        """``keep_within`` as a number."""
        return None if self.keep_within is None else seconds_of(self.keep_within, "keep-within")


class KeepRules(TypedDict, total=False):
    """The fields of a `Policy` as keyword arguments."""

    keep_last: int | None
    keep_every: int | None
    keep_within: Duration | None
    keep_daily: int | None
    keep_weekly: int | None
    keep_monthly: int | None
    keep_best: str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Thinning:
    """Leave out the tensors that match ``drop`` (fnmatch patterns on keys) of all that ``keep`` does not keep whole."""

    drop: tuple[str, ...]
    keep: Policy


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What stays: of permanent checkpoints what any of the rules keeps, and of ephemeral ones the newest of the run.

    ``max_checkpoints``: that many of the newest, not counting tagged ones and those of ``fixed`` steps, which stay in
    any case. Without ``keep`` and ``max_checkpoints`` everything stays. ``thin``: what is left out of what stays.
    """

    keep: Policy | None = None
    max_checkpoints: int | None = None
    fixed: frozenset[int] = frozenset()
    thin: Thinning | None = None

    @property
    def is_empty(self) -> bool:
        """Tell whether all checkpoints stay."""
        return self.keep is None and self.max_checkpoints is None


def thinning_of(rule: Any) -> Thinning | None:
    """Return what ``{"drop": ["optim.*"], "keep_last": 2}`` means. Raises InvalidInput."""
    if rule is None:
        return None
    if not isinstance(rule, Mapping) or not {"drop"} <= rule.keys() <= {"drop", *KeepRules.__annotations__}:
        raise InvalidInput(f'thin={rule!r:.200} is not usable; give a dict as {{"drop": ["optim.*"], "keep_last": 2}}')
    keep = Policy(**{name: value for name, value in rule.items() if name != "drop"})
    if keep.is_empty:
        raise InvalidInput(f"thin={rule!r:.200} does not say what stays whole; give keep_last=1 or another rule, too")
    return Thinning(tuple(sorted(patterns_of(rule["drop"]))), keep)


def patterns_of(drop: Any) -> frozenset[str]:
    """Return patterns of keys, checked; one text is one. Raises InvalidInput."""
    given: Any = [drop] if isinstance(drop, str) else drop
    if not isinstance(given, list | tuple | Set) or not given or not all(isinstance(one, str) and one for one in given):
        raise InvalidInput(f"drop={drop!r:.80} is not usable; give patterns of keys, as ['optim.*']")
    if sum(map(len, given)) > MAX_PATTERNS:
        raise InvalidInput(f"what to drop has more than {MAX_PATTERNS} characters; give fewer patterns, or shorter")
    return frozenset(given)


@dataclass(frozen=True, slots=True)
class RetentionCandidate:
    """A visible checkpoint as a policy sees it. ``created_at``: microseconds since the epoch.

    ``metrics``: numbers by name. ``healthy``: the word of whoever saved it, None for none.
    """

    txid: TxId
    run: str
    step: int
    created_at: int
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    healthy: bool | None = None


def plan_forget(
    visible: Iterable[RetentionCandidate],
    policy: Policy,
    now: int,
    *,
    tagged: Container[TxId] = (),
    run: str | None = None,
) -> list[RetentionCandidate]:
    """Choose what ``policy`` forgets of the ``visible`` checkpoints of a store at ``now`` (microseconds).

    Both are in the order of the saves. Twins (the same run and step, twice) that a later save superseded are forgotten
    by every policy and count for no rule. ``tagged`` ones are never chosen. ``run`` limits it to that run.
    """
    if policy.is_empty:
        return []
    wanted = [one for one in visible if run is None or one.run == run]
    by_run = grouped(wanted, lambda one: one.run)
    chosen = {one.txid for group in by_run.values() for one in _forget_of_run(group, policy, now)}
    return [one for one in wanted if one.txid in chosen and one.txid not in tagged]


def runs_without(
    visible: Iterable[RetentionCandidate], policy: Policy, *, run: str | None = None
) -> dict[str, list[str]]:
    """Return by metric of ``keep_best`` the runs of which no checkpoint has a number for it, and so all stay.

    Raises InvalidInput if no checkpoint has it at all, as its name may be mistyped. ``run`` limits it to that run.
    """
    by_run = grouped((one for one in visible if run is None or one.run == run), lambda one: one.run)
    there = {name for group in by_run.values() for one in group for name in one.metrics}
    for best in policy.best if by_run else ():
        if best.metric not in there:
            known = (
                f"there are {', '.join(sorted(there))}: give one of these"
                if there
                else "none of them has any: save with metrics={...}, or leave this rule out"
            )
            of = "here" if run is None else f"of run {run}"
            raise InvalidInput(f"keep-best: no checkpoint {of} has a metric {best.metric!r}; {known}")
    return {
        best.metric: [run for run, group in by_run.items() if not any(map(best.is_known_of, group))]
        for best in policy.best
    }


def _forget_of_run(group: list[RetentionCandidate], policy: Policy, now: int) -> list[RetentionCandidate]:
    """Choose what is forgotten of one run. ``group``: its checkpoints, oldest first."""
    answers = {one.step: one.txid for one in group}  # of twins, the last one
    current = [one for one in group if answers[one.step] == one.txid]
    keep = {one.txid for one in newest_of(current)} | {one.txid for one in _kept_by_rules(current, policy, now)}
    return [one for one in group if one.txid not in keep]


def newest_of(current: Sequence[RetentionCandidate]) -> list[RetentionCandidate]:
    """Return the last one, and the last one that nobody called unhealthy: whatever the rules say, these stay."""
    healthy = next((one for one in reversed(current) if one.healthy is not False), None)
    return [*current[-1:], *([] if healthy is None else [healthy])]


def _kept_by_rules(current: list[RetentionCandidate], policy: Policy, now: int) -> Iterator[RetentionCandidate]:
    """Choose what the rules keep of one run. ``current``: all of its checkpoints that count, oldest first."""
    if policy.keep_last:
        yield from current[-policy.keep_last :]
    if policy.keep_every is not None:
        yield from (one for one in current if one.step % policy.keep_every == 0)
    if policy.within_seconds is not None:
        most = policy.within_seconds * 1_000_000
        yield from (one for one in current if now - one.created_at <= most)
    for best in policy.best:
        yield from best.of(current)
    for rule, form in _CALENDAR.items():
        periods = getattr(policy, rule)
        if periods is not None:
            newest = {_moment(one).strftime(form): one for one in sorted(current, key=lambda kept: kept.created_at)}
            yield from list(newest.values())[-periods:]


def _moment(one: RetentionCandidate) -> datetime:
    return datetime.fromtimestamp(one.created_at / 1e6, UTC)
