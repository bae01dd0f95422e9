"""The minimum age: how long something must have been forgotten or replaced before gc may delete it, and its floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from casckpt.base.units import format_duration
from casckpt.errors import InvalidInput
from casckpt.format.records import Settings
from casckpt.history.commits import Commit
from casckpt.repository.reading import PREFIX, read_records
from casckpt.repository.repository import Repository


@dataclass(frozen=True)
class MinAge:
    """The minimum time between the `forgotten` record and the purge, in seconds.

    ``has_floor``: whether the store's settings have one.
    """

    usual: float
    ephemeral: float
    has_floor: bool = False

    def of(self, commit: Commit) -> int:
        """Return the minimum age of a commit, in microseconds."""
        return round(1e6 * (self.ephemeral if commit.committed.ephemeral else self.usual))


A_DAY = MinAge(24 * 3600.0, 15 * 60.0)  # so that users have time to notice and undo a wrong rule
AT_ONCE = MinAge(0.0, 0.0)


def min_age_of(repo: Repository, wanted: float | None, unset: MinAge = A_DAY) -> MinAge:
    """Return ``wanted``, or else the store's setting, or else ``unset``, in seconds.

    A setting is a floor: raises `InvalidInput` if ``wanted`` is less. If a setting was lowered, the earlier value
    counts until the settings that lowered it are as old as this value.
    """
    history = _history(repo)
    floors = {name: _floor(repo, history, name) for name in ("min_age", "min_age_ephemeral")}
    for name, floor in floors.items():
        if wanted is not None and wanted < floor:
            raise InvalidInput(
                f"min-age: {format_duration(wanted)} is less than the store's setting {name} ({format_duration(floor)})"
                f": pass at least that, or lower it with `casckpt settings STORE --set {name}=VALUE`, which counts "
                f"{format_duration(floor)} later"
            )
    has_floor, now = any(floors.values()), history[-1]
    if wanted is not None:
        return MinAge(wanted, wanted, has_floor)
    return MinAge(
        max(floors["min_age"], unset.usual if now.min_age_seconds is None else 0.0),
        max(floors["min_age_ephemeral"], unset.ephemeral if now.min_age_ephemeral_seconds is None else 0.0),
        has_floor,
    )


def _history(repo: Repository) -> list[Settings]:
    """Return the generations of the settings that can be read, oldest first. Raises an error if the newest cannot."""
    entries = repo.numbered(PREFIX)
    found = read_records(repo, PREFIX, entries.values(), lambda _: Settings)
    every = [found[entries[number].key] for number in sorted(entries)]
    newest = every.pop() if every else None
    return [
        *(one for one in every if isinstance(one, Settings)),
        newest if isinstance(newest, Settings) else repo.settings,
    ]


def _floor(repo: Repository, history: Sequence[Settings], name: str) -> float:
    """Return the highest value of a setting that still counts, or 0."""
    values, now = [getattr(one, f"{name}_seconds") or 0.0 for one in history], repo.clock()
    pairs = zip_longest(values, history[1:])
    return max(value for value, after in pairs if after is None or now < after.created_at + 1e6 * value)
