"""The minimum age: how long something must have been forgotten or replaced before gc may delete it, and its floor.

Where the store's settings have a floor, and in buckets also where a gc is given an age, ages count by the storage's
clock, from the time of the record that hid the bytes. A writer can choose the time in a record, but not that of the
object. What another process has purged then waits, too: its bytes stay as long as gc itself would have waited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any, TypeAlias

from casckpt.base.units import format_duration
from casckpt.errors import Damaged, InvalidInput, StorageError
from casckpt.format import notes
from casckpt.format.keys import commit_key, settings_key
from casckpt.format.names import TxId
from casckpt.format.records import Settings
from casckpt.history.commits import PREFIX as COMMITS
from casckpt.history.commits import Commit, CommitList
from casckpt.history.tags import FOREIGN_CLOCKS
from casckpt.repository.exclusive import new_name
from casckpt.repository.reading import PREFIX, read_records
from casckpt.repository.repository import Repository

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordTimes:
    """When the records in commits/ were created, by the storage's clock, and its time ``now``, in microseconds."""

    now: int
    times: Mapping[str, int] = field(repr=False)

    def of(self, txid: TxId, number: int, ended: int = 0) -> int:
        """Return since when a record counts: since it and all before it in the log exist. Unknown records are new.

        ``ended``: a later record that ended what ``number`` hid. It counts instead if there is a gap before ``number``,
        because who reads a log by its keys stops there.
        """
        times = [self.times.get(commit_key(txid, each)) for each in range(number + 1)]
        if ended > number and None in times[:number]:
            return self.of(txid, ended)
        return self.now if times[number] is None else max(time for time in times if time is not None)


@dataclass(frozen=True)
class MinAge:
    """The minimum time between the `forgotten` record and the purge, in seconds.

    ``has_floor``: whether the store's settings have one. ``times``: None if the times in the records count.
    """

    usual: float
    ephemeral: float
    has_floor: bool = False
    times: RecordTimes | None = None

    def of(self, commit: Commit, seen: Container[str] | None = None) -> int:
        """Return the minimum age of a commit, in microseconds.

        ``seen``: the runs that have visible checkpoints. In others, an ephemeral one waits as long as the rest.
        """
        if not commit.committed.ephemeral:
            return round(1e6 * self.usual)
        is_alone = seen is not None and commit.run not in seen
        return round(1e6 * max(self.ephemeral, self.usual if is_alone else 0.0))

    def young(self, listed: CommitList) -> list[Commit]:
        """Return the ended places whose bytes stay, because they have not been hidden for the minimum age."""
        if self.times is None:
            return []
        times, seen = self.times, {commit.run for commit in listed.visible()}
        every = (one for one in listed.commits.values() if one.ended)
        ended = [(one.at(places), by) for one in every for places, by in zip(one.ended, one.hidden_by, strict=True)]
        return [one for one, by in ended if (age := self.of(one, seen)) and times.of(one.txid, *by) + age > times.now]


A_DAY = MinAge(24 * 3600.0, 15 * 60.0)  # so that users have time to notice and undo a wrong rule
AT_ONCE = MinAge(0.0, 0.0)
Now: TypeAlias = Callable[[], int | None]


def ages_of(repo: Repository, wanted: float | None = None) -> MinAge:
    """Return `min_age_of`, with the storage's times if they count. Puts and deletes an object to learn the time."""
    now = cache(partial(_now, repo))
    ages = min_age_of(repo, wanted, now=now)
    counts = ages.has_floor or (wanted is not None and repo.storage.traits.remote)
    return replace(ages, times=_times(repo, now)) if counts and (ages.usual or ages.ephemeral) else ages


def min_age_of(repo: Repository, wanted: float | None, unset: MinAge = A_DAY, now: Now = lambda: None) -> MinAge:
    """Return ``wanted``, or else the store's setting, or else ``unset``, in seconds.

    A setting is a floor: raises `InvalidInput` if ``wanted`` is less. If a setting was lowered, the earlier value
    counts until the settings that lowered it are as old as this value. ``now``: the storage's time; without it, this
    compares the time in the settings with this host's clock.
    """
    history = _history(repo)
    floors = {name: _floor(repo, history, name, now) for name in ("min_age", "min_age_ephemeral")}
    for name, floor in floors.items():
        if wanted is not None and wanted < floor:
            raise InvalidInput(
                f"min-age: {format_duration(wanted)} is less than the store's setting {name} ({format_duration(floor)})"
                f": pass at least that, or lower it with `casckpt settings STORE --set {name}=VALUE`, which counts "
                f"{format_duration(floor)} later"
            )
    has_floor, newest = any(floors.values()), history[-1][0]
    if wanted is not None:
        return MinAge(wanted, wanted, has_floor)
    return MinAge(
        max(floors["min_age"], unset.usual if newest.min_age_seconds is None else 0.0),
        max(floors["min_age_ephemeral"], unset.ephemeral if newest.min_age_ephemeral_seconds is None else 0.0),
        has_floor,
    )


def _history(repo: Repository) -> list[tuple[Settings, int | None]]:
    """Return all settings, oldest first, each with the storage's time of the object.

    Raises `Damaged` or `Refused` if one cannot be read or is missing, because it may be a floor.
    """
    repo.check_exists()
    numbered = repo.numbered(PREFIX)
    found = read_records(repo, PREFIX, numbered.values(), lambda _: Settings)
    for key in (settings_key(number) for number in range(max(numbered, default=-1) + 1)):
        if not isinstance(one := found.get(key, Damaged("it is missing")), Settings):
            message = f"{key} may have a min_age, and cannot be read: {one}. Restore it from a copy of the store"
            raise type(one)(message, key=key)
    known: list[tuple[Any, int | None]] = [(found[one.key], one.time) for _, one in sorted(numbered.items())]
    return known or [(repo.settings, None)]


def _floor(repo: Repository, history: Sequence[tuple[Settings, int | None]], name: str, now: Now) -> float:
    """Return the highest value of a setting that still counts, or 0."""
    values = [getattr(one, f"{name}_seconds") or 0.0 for one, _ in history]
    if max(values) == values[-1]:
        return values[-1]
    there = now()
    since = [one.created_at if there is None or time is None else time for one, time in history[1:]]
    at = repo.clock() if there is None else there
    return max(value for value, time in zip_longest(values, since) if time is None or at - time < 1e6 * value)


def _now(repo: Repository) -> int | None:
    """Return the storage's time of an object that this call puts, or None if there is none, or no room for it."""
    key = new_name(repo.clock, repo.entropy)
    with suppress(StorageError):
        repo.put_small(key, b"now")
        found = next((entry.time for entry in repo.storage.list(key)), None)
        repo.storage.delete(key)
        return found
    return None


def _times(repo: Repository, now: Now) -> RecordTimes:
    """Return the times of all records. On storage without times, these are when this host first saw the records."""
    listed = {entry.key: entry.time for entry in repo.storage.list(COMMITS)}
    times, here, there = {key: time for key, time in listed.items() if time is not None}, repo.clock(), now()
    if len(times) < len(listed):
        seen = notes.decode(repo.catalogue.note("first-seen"), notes.FIRST_SEEN) or {}
        times = {key: min(here, seen.get(key, here)) for key in listed}
        repo.catalogue.set_note("first-seen", notes.encode(times))
        there = here
    if there is None:  # the newest record is not later than now
        there = min(here, max(times.values(), default=0))
    ahead = [key for key, time in times.items() if time > there + FOREIGN_CLOCKS]
    if ahead:
        log.warning(
            "%s: the storage's times of %d records, such as %s, are in the future; gc keeps what they hide until then",
            repo.storage.url, len(ahead), min(ahead),
        )  # fmt: skip
    return RecordTimes(there, times)
