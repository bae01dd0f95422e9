"""Checks that storage refuses to create a key twice, and lists new keys. The safety of a store depends on this.

Some S3-compatible servers and some old clients silently ignore the condition of a put. Two jobs can then both create
the same key, and gc can delete objects that a save has just committed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from casckpt.base.parallel import in_parallel
from casckpt.errors import StorageError, Unsupported
from casckpt.storage.base import AlreadyExists, Examinable, ObjectStore

Clock: TypeAlias = Callable[[], int]  # as in `casckpt.repository.repository`
Entropy: TypeAlias = Callable[[int], bytes]
PREFIX = "probes/"
RACERS = 4
_PAYLOAD = 64  # bytes
_LONGEST = 24 * 3600 * 1_000_000  # microseconds: no probe takes this long
_NAME = re.compile(rf"{PREFIX}([0-9A-F]{{16}})-[0-9A-F]{{32}}\b.*")


def require_exclusive(
    storage: ObjectStore, clock: Clock, entropy: Entropy, known: bool | None, *, single_writer: bool
) -> None:
    """Raise `Unsupported` for storage in which two writers could both create the same key.

    ``known``: the result of an earlier probe. ``single_writer``: the caller promises to be the only writer.
    """
    traits = storage.traits
    if single_writer or (traits.exclusive is None and known):
        return
    why = {True: "", False: "it cannot check and create in one step", None: None}[traits.exclusive]
    if why is None:
        why = probe(storage, clock, entropy) if known is None else "an earlier probe recorded this in the settings"
    if why:
        raise Unsupported(
            f"{storage.url} does not refuse to create a key twice: {why}. Two jobs could therefore both commit the "
            "same checkpoint, and gc could delete objects of a new save. Use a different storage, or pass "
            "single_writer (--single-writer) if no other process writes at the same time"
        )


def require_lasting(storage: ObjectStore) -> None:
    """Raise `Unsupported` for storage that deletes or archives objects by age, as far as its settings can be read."""
    if not (isinstance(storage, Examinable) and storage.traits.remote):
        return
    finding = None
    with suppress(StorageError):  # writers may lack the permission to read settings
        finding = next(storage.examine(), None)
    if finding is not None and finding.ok is False:
        raise Unsupported(f"{storage.url} is not safe for a store: {finding.found}. To fix this, {finding.advice}")


def probe(storage: ObjectStore, clock: Clock, entropy: Entropy, racers: int = RACERS) -> str:
    """Return what is wrong with exclusive creates in ``storage``, or "" if they work.

    Puts two small objects under probes/, several times each, and deletes them if the storage allows it. Raises
    `Unsupported`, and `StorageError` also for a listing that lacks one of them.
    """
    name = new_name(clock, entropy)
    keys = [f"{name}-twice", f"{name}-race"]
    try:
        if not (why := _twice(storage, keys[0], entropy) or _race(storage, keys[1], entropy, racers)):
            check_listed(storage, *keys)
        return why
    finally:
        for key in keys:
            with suppress(StorageError):  # writers may lack the permission to delete
                storage.delete(key)


def new_name(clock: Clock, entropy: Entropy) -> str:
    """Return the beginning of a new probe's keys: its time and random digits, for `remove_leftovers`."""
    return f"{PREFIX}{clock():016X}-{entropy(16).hex().upper()}"  # some servers change the case of keys


def remove_leftovers(storage: ObjectStore, clock: Clock) -> None:
    """Delete what killed probes left behind at least a day ago. Raises `StorageError`."""
    for entry in [*storage.list(PREFIX)]:
        if (match := _NAME.fullmatch(entry.key)) and int(match[1], 16) < clock() - _LONGEST:
            storage.delete(entry.key)


def _twice(storage: ObjectStore, key: str, entropy: Entropy) -> str:
    _wins(storage, key, entropy(_PAYLOAD))  # if this create is refused, the response to an earlier attempt was lost
    if _wins(storage, key, entropy(_PAYLOAD)):
        return "a second create replaced the first one without an error"
    return ""


def _race(storage: ObjectStore, key: str, entropy: Entropy, racers: int) -> str:
    payloads = [entropy(_PAYLOAD) for _ in range(racers)]
    firsts = in_parallel(racers, lambda data: _wins(storage, key, data), payloads, name="probe")
    won = [data for data, first in zip(payloads, firsts, strict=True) if first]
    if len(won) > 1:
        return f"{len(won)} of {racers} concurrent creates of one key succeeded"
    found = None if storage.size(key) is None else storage.get(key, limit=_PAYLOAD)
    if won and found != won[0]:
        return "one of several concurrent creates of a key succeeded, but the key has the bytes of a different one"
    return "" if found in payloads else "none of several concurrent creates of a key succeeded"


def check_listed(storage: ObjectStore, *keys: str) -> None:
    """Raise `StorageError` if a listing lacks one of ``keys``, which are in one folder and were just created."""
    for key in {*keys} - {entry.key for entry in storage.list(keys[0].rpartition("/")[0] + "/")}:
        if storage.size(key) is not None:  # otherwise, it has been deleted in the meantime
            why = "gc could therefore delete what a checkpoint needs. Use storage that lists new objects immediately"
            raise StorageError(f"{storage.url} does not list {key}, although it exists: {why}", key=key)


def _wins(storage: ObjectStore, key: str, data: bytes) -> bool:
    try:
        storage.put(key, data)
    except AlreadyExists:
        return False
    return True
