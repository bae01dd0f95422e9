"""Retention: chooses the checkpoints that a policy forgets, without access to storage or a clock.

A policy is a union of rules that is applied to each run separately: it keeps every checkpoint that any rule keeps. It
always keeps the newest checkpoint of a run, the newest checkpoint that is not marked unhealthy, and every tagged
checkpoint. "Newest" refers to the time of the save, not to the step, because a run that was rolled back continues from
its latest save.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from math import isnan, nan
from typing import Any, Self, TypedDict

from casckpt.base.groups import grouped
from casckpt.base.names import Runs, is_among
from casckpt.base.units import Duration, seconds_of
from casckpt.errors import InvalidInput
from casckpt.format.names import TxId

MAX_PATTERNS = 1 << 14
_NUMBER = re.compile("[1-9][0-9]{0,8}")
_LOWER = re.compile("loss|err", re.IGNORECASE)  # metrics of which everybody wants the lowest
# in UTC; %V is the ISO 8601 week
_CALENDAR = {"keep_daily": "%Y-%m-%d", "keep_weekly": "%G-%V", "keep_monthly": "%Y-%m"}


@dataclass(frozen=True, slots=True)
class Best:
    """The ``count`` checkpoints with the lowest or highest ``metric``."""

    metric: str
    count: int
    is_max: bool = False

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Parse NAME:min:N or NAME:max:N, or NAME:N for a loss or an error. Raises InvalidInput."""
        name, _, number = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        metric, _, way = name.rpartition(":")
        if way not in ("min", "max") or not metric:
            metric, way = name, "min" if _LOWER.search(name) else ""
        if not metric or not _NUMBER.fullmatch(number):
            raise InvalidInput(
                f'keep-best {text!r:.120} is not valid: pass a metric and a number, such as "loss:3" or "acc:max:1"'
            )
        if not way:
            raise InvalidInput(
                f"keep-best {text!r:.120} does not say which values are better: pass '{name}:max:{number}' to keep the "
                f"highest, or '{name}:min:{number}' to keep the lowest"
            )
        return cls(metric, int(number), way == "max")

    def of(self, current: Iterable[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Return the best of ``current``, which is sorted oldest first. Return all of them if none has the metric."""
        known = [saved for saved in current if self.is_known_of(saved)]
        if not known:
            return list(current)
        return sorted(known, key=lambda saved: saved.metrics[self.metric] * (-1 if self.is_max else 1))[: self.count]

    def is_known_of(self, checkpoint: SavedCheckpoint) -> bool:
        """Return whether a checkpoint has a numeric value for the metric."""
        return not isnan(checkpoint.metrics.get(self.metric, nan))


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules that determine which checkpoints of a run are kept. One matching rule is enough.

    Without rules, all are kept. ``keep_last``: keep this many of the newest checkpoints. ``keep_every``: keep
    checkpoints whose step is a multiple of this. ``keep_within``: keep checkpoints younger than this ("7d", or a
    timedelta). ``keep_daily``, ``keep_weekly``, ``keep_monthly``: keep the newest checkpoint of each of the last N
    days, weeks (from Monday) and months, in UTC, in which a checkpoint was created. ``keep_best``: one or more values
    such as "loss:3" (keep the three with the lowest loss), "ppl:min:3" or "acc:max:1" (keep the one with the highest
    acc); only names with "loss" or "err" need no direction. Of checkpoints with equal values, this rule keeps those
    that were saved first. It does not keep checkpoints that lack the metric or have NaN, but if no checkpoint of the
    run has the metric, it keeps all of them. Raises InvalidInput for invalid values.
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
            raise InvalidInput(f"keep-last {self.keep_last!r} is not valid: pass a number of checkpoints, 1 or more")
        for rule in ("keep_every", *_CALENDAR):
            number = getattr(self, rule)
            if number is not None and (type(number) is not int or number < 1):
                raise InvalidInput(f"{rule.replace('_', '-')} {number!r} is not valid: pass a number, 1 or more")
        if self.keep_within is not None:
            seconds_of(self.keep_within, "keep-within")
        if not self.best:  # an empty list, for example from a repeatable option
            object.__setattr__(self, "keep_best", None)
        if self.keep_last == 0 and replace(self, keep_last=None).is_empty:
            raise InvalidInput(
                "keep-last 0 would keep nothing, but the newest checkpoint of a run is always kept: pass 1, or name "
                "what to forget"
            )

    @property
    def is_empty(self) -> bool:
        """Whether the policy has no rules."""
        return all(getattr(self, rule.name) is None for rule in fields(self))

    @property
    def best(self) -> list[Best]:
        """The parsed values of ``keep_best``. Raises InvalidInput."""
        given = self.keep_best if isinstance(self.keep_best, list | tuple) else [self.keep_best]
        return [Best.parse(text) for text in given if text is not None]


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
    """Drop the tensors whose keys match ``drop`` (fnmatch patterns) from checkpoints that ``keep`` does not keep."""

    drop: tuple[str, ...]
    keep: Policy


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rules by which a run is rotated. ``keep`` applies to checkpoints that are not ephemeral.

    The newest checkpoint of the run is always kept. ``max_checkpoints``: keep this many of the newest. Tagged
    checkpoints and checkpoints of ``fixed`` steps do not count, and are always kept. If neither ``keep`` nor
    ``max_checkpoints`` is given, all checkpoints are kept. ``thin``: how to thin the checkpoints that are kept.
    """

    keep: Policy | None = None
    max_checkpoints: int | None = None
    fixed: frozenset[int] = frozenset()
    thin: Thinning | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether all checkpoints are kept."""
        return self.keep is None and self.max_checkpoints is None

    @property
    def changes_nothing(self) -> bool:
        """Return whether all checkpoints are kept whole."""
        return self.is_empty and self.thin is None

    @property
    def metrics(self) -> set[str]:
        """The metrics that the rules name."""
        policies = [*([self.keep] if self.keep else []), *([self.thin.keep] if self.thin else [])]
        return {best.metric for policy in policies for best in policy.best}


def thinning_of(rule: Any) -> Thinning | None:
    """Parse ``{"drop": ["optim.*"], "keep_last": 2}``. Raises InvalidInput."""
    if rule is None:
        return None
    if not isinstance(rule, Mapping) or not {"drop"} <= rule.keys() <= {"drop", *KeepRules.__annotations__}:
        raise InvalidInput(
            f'thin={rule!r:.200} is not valid; pass a dict such as {{"drop": ["optim.*"], "keep_last": 2}}'
        )
    keep = Policy(**{name: value for name, value in rule.items() if name != "drop"})
    if keep.is_empty:
        raise InvalidInput(
            f"thin={rule!r:.200} does not specify which checkpoints to keep whole; also pass keep_last=1 or a "
            "different rule"
        )
    return Thinning(tuple(sorted(patterns_of(rule["drop"]))), keep)


def patterns_of(drop: Any) -> frozenset[str]:
    """Check key patterns and return them. A string is a single pattern. Raises InvalidInput."""
    given: Any = [drop] if isinstance(drop, str) else drop
    if not isinstance(given, list | tuple | Set) or not given or not all(isinstance(key, str) and key for key in given):
        raise InvalidInput(f"drop={drop!r:.80} is not valid; pass key patterns, such as ['optim.*']")
    if sum(map(len, given)) > MAX_PATTERNS:
        raise InvalidInput(
            f"the patterns to drop have more than {MAX_PATTERNS} characters; pass fewer or shorter patterns"
        )
    return frozenset(given)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A visible checkpoint, as a policy sees it. ``created_at``: microseconds since the epoch.

    ``metrics``: numbers by name. ``healthy``: the value that its save recorded, or None if unknown.
    """

    txid: TxId
    run: str
    step: int
    created_at: int
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    healthy: bool | None = None


def reasons_to_keep(
    visible: Iterable[SavedCheckpoint], policy: Policy, now: int, *, without_best: Container[str] = ()
) -> dict[TxId, list[str]]:
    """Return why ``policy`` keeps ``visible`` checkpoints, such as ["newest", "keep-last 2"], at the time ``now``.

    Leaves out those that the policy forgets. ``visible``: in the order of the saves. If a run has a step twice,
    every policy forgets the earlier checkpoint, and no rule counts it. ``now``: in microseconds. ``without_best``:
    runs to which ``keep_best`` does not apply.
    """
    keep: dict[TxId, list[str]] = defaultdict(list)
    for run, group in grouped(visible, lambda saved: saved.run).items():
        of_run = replace(policy, keep_best=None) if run in without_best else policy
        last = {saved.step: saved for saved in group}  # the last checkpoint of each step
        current = [saved for saved in group if last[saved.step] is saved]
        rules = [("no rule", group)] if policy.is_empty else _kept_by_rules(current, of_run, now)
        for why, saved in ((why, saved) for why, kept in rules for saved in kept):
            keep[saved.txid].append(why)
    return keep


def unmeasured(visible: Iterable[SavedCheckpoint], policy: Policy) -> set[str]:
    """Return the runs without any metric, if ``policy`` has rules besides ``keep_best``. gc applies only these to them.

    Rotation does not, because it purges immediately, and the first evaluation may come later.
    """
    others = any(getattr(policy, rule.name) for rule in fields(policy) if rule.name != "keep_best")
    by_run = grouped(visible if policy.best and others else (), lambda saved: saved.run)
    return {run for run, group in by_run.items() if not any(saved.metrics for saved in group)}


def runs_without(visible: Iterable[SavedCheckpoint], policy: Policy, *, run: Runs = None) -> dict[str, list[str]]:
    """Return, for each metric of ``keep_best``, the runs without a number for it. All of their checkpoints are kept.

    `unmeasured` says which of them gc trims nevertheless. Raises InvalidInput if no checkpoint has the metric, because
    its name may be mistyped. ``run`` limits the check to these runs.
    """
    by_run = grouped((saved for saved in visible if is_among(saved.run, run)), lambda saved: saved.run)
    there = {name for group in by_run.values() for saved in group for name in saved.metrics}
    every = [saved for group in by_run.values() for saved in group]
    for best in policy.best if len(unmeasured(every, policy)) < len(by_run) else ():
        if best.metric not in there:
            known = (
                f"the existing metrics are {', '.join(sorted(there))}: pass one of these"
                if there
                else "none of them has any metrics: save with metrics={...}, or omit this rule"
            )
            of = "here" if run is None else f"of run {run if isinstance(run, str) else ', '.join(run)}"
            raise InvalidInput(f"keep-best: no checkpoint {of} has a metric {best.metric!r}; {known}")
    return {
        best.metric: [run for run, group in by_run.items() if not any(map(best.is_known_of, group))]
        for best in policy.best
    }


def newest_of(current: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return the newest checkpoint, and the newest one that is not marked unhealthy. Every policy keeps both."""
    healthy = next((saved for saved in reversed(current) if saved.healthy is not False), None)
    return [*current[-1:], *([] if healthy is None else [healthy])]


def _kept_by_rules(
    current: list[SavedCheckpoint], policy: Policy, now: int
) -> Iterator[tuple[str, Iterable[SavedCheckpoint]]]:
    """Choose the checkpoints of one run that each rule keeps. ``current``: one checkpoint per step, oldest first."""
    last, *healthy = newest_of(current)
    yield from (("newest", [last]), ("newest healthy", [saved for saved in healthy if saved is not last]))
    if policy.keep_last:
        yield f"keep-last {policy.keep_last}", current[-policy.keep_last :]
    if policy.keep_every is not None:
        yield f"keep-every {policy.keep_every}", (saved for saved in current if saved.step % policy.keep_every == 0)
    if policy.keep_within is not None:
        since = now - seconds_of(policy.keep_within, "keep-within") * 1_000_000
        yield f"keep-within {policy.keep_within}", (saved for saved in current if saved.created_at >= since)
    for best in policy.best:
        yield f"keep-best {best.metric}:{best.count}", best.of(current)
    for rule, form in _CALENDAR.items():
        periods = getattr(policy, rule)
        if periods is not None:
            by_time = sorted(current, key=lambda saved: saved.created_at)
            times = (datetime.fromtimestamp(saved.created_at / 1e6, UTC) for saved in by_time)
            newest = {time.strftime(form): saved for time, saved in zip(times, by_time, strict=True)}
            yield f"{rule.replace('_', '-')} {periods}", list(newest.values())[-periods:]
