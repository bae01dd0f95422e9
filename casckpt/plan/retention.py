"""Retention: the choice of the checkpoints that a policy forgets. Pure: no storage, no clock.

A policy is a union of rules, applied to each run alone: it keeps a checkpoint that any rule keeps. It always keeps the
newest checkpoint of a run, the newest one that is not marked unhealthy, and every tagged one. "Newest" means by time of
the save, not by step, because a run that was rolled back continues from its latest save.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from math import isnan, nan
from typing import Any, Self, TypedDict

from casckpt.base.groups import grouped
from casckpt.base.units import Duration, seconds_of
from casckpt.errors import InvalidInput
from casckpt.format.names import TxId

MAX_PATTERNS = 1 << 14
_NUMBER = re.compile("[1-9][0-9]{0,8}")
_CALENDAR = {"keep_daily": "%Y-%m-%d", "keep_weekly": "%G-%V", "keep_monthly": "%Y-%m"}  # of UTC; %V: weeks of ISO 8601


@dataclass(frozen=True, slots=True)
class Best:
    """The ``count`` checkpoints with the lowest ``metric``, or with the highest."""

    metric: str
    count: int
    is_max: bool = False

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Parse NAME:N, NAME:min:N or NAME:max:N. Raises InvalidInput."""
        name, _, number = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        metric, _, way = name.rpartition(":")
        if way not in ("min", "max") or not metric:
            metric, way = name, "min"
        if not metric or not _NUMBER.fullmatch(number):
            raise InvalidInput(f'keep-best {text!r:.120}: give a metric and a number, as "loss:3" or "acc:max:1"')
        return cls(metric, int(number), way == "max")

    def of(self, current: Iterable[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Return the best of ``current``, which is oldest first. Return all of them if none has the metric."""
        known = [saved for saved in current if self.is_known_of(saved)]
        if not known:
            return list(current)
        return sorted(known, key=lambda saved: saved.metrics[self.metric] * (-1 if self.is_max else 1))[: self.count]

    def is_known_of(self, checkpoint: SavedCheckpoint) -> bool:
        """Return whether a checkpoint has a number for the metric."""
        return not isnan(checkpoint.metrics.get(self.metric, nan))


@dataclass(frozen=True, slots=True)
class Policy:
    """The checkpoints to keep of each run: one matching rule is enough. Without rules, all stay.

    ``keep_last``: this number of the newest. ``keep_every``: those whose step is a multiple of it. ``keep_within``:
    those younger than this ("7d", or a timedelta). ``keep_daily``, ``keep_weekly``, ``keep_monthly``: the newest of
    each of the last N days, weeks (from Monday) and months, in UTC, in which any was created. ``keep_best``: one or
    several of "loss:3", the three with the lowest loss, and "acc:max:1", the one with the highest. Of equal ones it
    keeps those saved first. It keeps none without the metric or with NaN, but all if no checkpoint of the run has the
    metric. Raises InvalidInput for unusable values.
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
        if not self.best:  # an empty list, as from a repeatable option
            object.__setattr__(self, "keep_best", None)
        if self.keep_last == 0 and replace(self, keep_last=None).is_empty:
            raise InvalidInput(
                "keep-last 0 would keep nothing, but the newest of a run always stays: give 1, or name what to forget"
            )

    @property
    def is_empty(self) -> bool:
        """Whether it has no rule."""
        return all(getattr(self, rule.name) is None for rule in fields(self))

    @property
    def best(self) -> list[Best]:
        """``keep_best``, parsed. Raises InvalidInput."""
        given = self.keep_best if isinstance(self.keep_best, list | tuple) else [self.keep_best]
        return [Best.parse(text) for text in given if text is not None]

    @property
    def within_seconds(self) -> float | None:
        """``keep_within`` in seconds."""
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
    """Drop the tensors that match ``drop`` (fnmatch patterns on keys) from checkpoints that ``keep`` does not keep."""

    drop: tuple[str, ...]
    keep: Policy


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rules of a rotation: permanent checkpoints stay by any rule of ``keep``, the newest of the run always stays.

    ``max_checkpoints``: keep this number of the newest. Tagged checkpoints and those of ``fixed`` steps do not count,
    and always stay. Without ``keep`` and ``max_checkpoints`` all stay. ``thin``: how to thin the remaining ones.
    """

    keep: Policy | None = None
    max_checkpoints: int | None = None
    fixed: frozenset[int] = frozenset()
    thin: Thinning | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether all checkpoints stay."""
        return self.keep is None and self.max_checkpoints is None


def thinning_of(rule: Any) -> Thinning | None:
    """Parse ``{"drop": ["optim.*"], "keep_last": 2}``. Raises InvalidInput."""
    if rule is None:
        return None
    if not isinstance(rule, Mapping) or not {"drop"} <= rule.keys() <= {"drop", *KeepRules.__annotations__}:
        raise InvalidInput(f'thin={rule!r:.200} is not usable; give a dict as {{"drop": ["optim.*"], "keep_last": 2}}')
    keep = Policy(**{name: value for name, value in rule.items() if name != "drop"})
    if keep.is_empty:
        raise InvalidInput(f"thin={rule!r:.200} does not say what stays whole; give keep_last=1 or another rule, too")
    return Thinning(tuple(sorted(patterns_of(rule["drop"]))), keep)


def patterns_of(drop: Any) -> frozenset[str]:
    """Check patterns of keys, and return them; a text is one pattern. Raises InvalidInput."""
    given: Any = [drop] if isinstance(drop, str) else drop
    if not isinstance(given, list | tuple | Set) or not given or not all(isinstance(key, str) and key for key in given):
        raise InvalidInput(f"drop={drop!r:.80} is not usable; give patterns of keys, as ['optim.*']")
    if sum(map(len, given)) > MAX_PATTERNS:
        raise InvalidInput(f"what to drop has more than {MAX_PATTERNS} characters; give fewer patterns, or shorter")
    return frozenset(given)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A visible checkpoint as a policy sees it. ``created_at``: microseconds since the epoch.

    ``metrics``: numbers by name. ``healthy``: from its save, None if unknown.
    """

    txid: TxId
    run: str
    step: int
    created_at: int
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    healthy: bool | None = None


def plan_forget(
    visible: Iterable[SavedCheckpoint],
    policy: Policy,
    now: int,
    *,
    tagged: Container[TxId] = (),
    run: str | None = None,
) -> list[SavedCheckpoint]:
    """Choose the ``visible`` checkpoints that ``policy`` forgets at ``now`` (microseconds).

    Both are in the order of the saves. If a run has a step twice, every policy forgets the earlier one, and no rule
    counts it. ``tagged`` ones are never chosen. ``run`` limits the choice to that run.
    """
    if policy.is_empty:
        return []
    wanted = [saved for saved in visible if run is None or saved.run == run]
    by_run = grouped(wanted, lambda saved: saved.run)
    chosen = {saved.txid for group in by_run.values() for saved in _forget_of_run(group, policy, now)}
    return [saved for saved in wanted if saved.txid in chosen and saved.txid not in tagged]


def runs_without(visible: Iterable[SavedCheckpoint], policy: Policy, *, run: str | None = None) -> dict[str, list[str]]:
    """Return, for each metric of ``keep_best``, the runs without a number for it. Of these it keeps all checkpoints.

    Raises InvalidInput if no checkpoint has the metric: its name may be mistyped. ``run`` limits it to that run.
    """
    by_run = grouped((saved for saved in visible if run is None or saved.run == run), lambda saved: saved.run)
    there = {name for group in by_run.values() for saved in group for name in saved.metrics}
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


def _forget_of_run(group: list[SavedCheckpoint], policy: Policy, now: int) -> list[SavedCheckpoint]:
    """Choose the checkpoints to forget of one run. ``group``: its checkpoints, oldest first."""
    newest = {saved.step: saved.txid for saved in group}  # the last one of each step
    current = [saved for saved in group if newest[saved.step] == saved.txid]
    keep = {saved.txid for saved in (*newest_of(current), *_kept_by_rules(current, policy, now))}
    return [saved for saved in group if saved.txid not in keep]


def newest_of(current: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return the last checkpoint, and the last one that is not marked unhealthy. Every policy keeps these."""
    healthy = next((saved for saved in reversed(current) if saved.healthy is not False), None)
    return [*current[-1:], *([] if healthy is None else [healthy])]


def _kept_by_rules(current: list[SavedCheckpoint], policy: Policy, now: int) -> Iterator[SavedCheckpoint]:
    """Choose the checkpoints that the rules keep of one run. ``current``: one for each step, oldest first."""
    if policy.keep_last:
        yield from current[-policy.keep_last :]
    if policy.keep_every is not None:
        yield from (saved for saved in current if saved.step % policy.keep_every == 0)
    if policy.within_seconds is not None:
        most = policy.within_seconds * 1_000_000
        yield from (saved for saved in current if now - saved.created_at <= most)
    for best in policy.best:
        yield from best.of(current)
    for rule, form in _CALENDAR.items():
        periods = getattr(policy, rule)
        if periods is not None:
            by_time = sorted(current, key=lambda saved: saved.created_at)
            newest = {_moment(saved).strftime(form): saved for saved in by_time}
            yield from list(newest.values())[-periods:]


def _moment(checkpoint: SavedCheckpoint) -> datetime:
    return datetime.fromtimestamp(checkpoint.created_at / 1e6, UTC)
