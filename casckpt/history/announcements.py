"""Announcements: the log of each run in runs/, which shows saves and `latest` what changed, without all of commits/.

Before anybody creates a record in commits/ he announces it, at the next free number of its run. So who knows the run
up to N asks for N + 1 until there is none, and then knows every transaction that had a record when he began. What
became of each stands in its own log in commits/, which is read by its keys. An announcement whose record is not there
yet is kept like any other, and its log is read again. Nothing is deleted or reused on an announcement's word.

What was read is kept by the host, in its catalogue: the immutable announcements themselves, and nothing derived. So how
far a host has read and what it waits for can never differ. tests/model/protocol/announcements.py walks interleavings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from casckpt.base.groups import grouped
from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused
from casckpt.format import records
from casckpt.format.keys import MARKER, announcement_key, parse_announcement, parse_txid, run_folder
from casckpt.format.names import TxId
from casckpt.format.records import MAX_RECORD_BYTES, Announced
from casckpt.repository.caches import RunCache
from casckpt.repository.repository import Repository

PREFIX = "runs/"
_AT_ONCE = 1000  # that one announcement tells of
_NOT_WHAT_IT_WAS = (
    "the store at %s is not what it was: %s is not what this host has read there, so it was put back from a copy, or "
    "lost records. What this host knew of it counts no more"
)

log = logging.getLogger(__name__)

Fetched: TypeAlias = Announced | CasckptError | None
"""An announcement, why it cannot be read, or None where there is none."""
Announcement: TypeAlias = tuple[TxId, int]
"""A transaction and the number of a record in its log that somebody is about to create."""


def look(repo: Repository, run: str, *, anew: bool = False) -> RunCache:
    """Return the announcements of a run (by its hash), ``head`` at least the highest that was there when this began.

    ``anew``: without those that the host has read, unless this process knows them. Two small requests where they are
    known, and one for each announcement since; else two listings of a folder. Raises `NotFound` where there is no
    store, `StorageError`.
    """
    repo.check_exists()
    known = repo.runs[run]
    with known.lock.get():
        if not anew:
            _load(repo, run, known)
        if known.head < 0:
            known.head = _head(repo, run)
            return known
        if _read_on(repo, run, known):
            return known
    is_gone = repo.storage.size(MARKER) is None  # then a save makes a new one, and says so
    told = logging.INFO if is_gone else logging.WARNING
    log.log(told, _NOT_WHAT_IT_WAS, repo.storage.url, announcement_key(run, known.head))
    repo.forget_all(keep_marker=is_gone)
    return look(repo, run)


def read_back(repo: Repository, run: str, low: int = 0) -> RunCache:
    """Read all from the number ``low`` to the head that nobody has read yet. `look` first. Raises `StorageError`."""
    known = repo.runs[run]
    with known.lock.get():
        numbers = known.unread(low)
        for number, found in zip(numbers, _fetch(repo, run, numbers), strict=True):
            _add(known, run, number, NotFound("it is missing") if found is None else found)
    return known


def announce(repo: Repository, announced: Iterable[Announcement], *, seen: int | None = None) -> None:
    """Announce records, before they are created. What this process knows to be announced is not announced again.

    ``seen``: of a save that has looked, and whose txid is later than all that it saw: up to which number. Raises
    `StorageError`.
    """
    for run, of_run in grouped(announced, lambda one: parse_txid(one[0]).run_hash).items():
        for first in range(0, len(of_run), _AT_ONCE):
            _announce(repo, run, of_run[first : first + _AT_ONCE], seen)


def _announce(repo: Repository, run: str, wanted: Sequence[Announcement], seen: int | None) -> None:
    known = repo.runs[run]
    with known.lock.get():
        left = _unannounced(known, wanted)
        if left and seen is None:
            known = look(repo, run)  # a number is never put behind a hole: another store may be in its place
            left = _unannounced(known, wanted)
        while left:
            number = known.head + 1
            record = Announced(time=repo.clock(), announced=list(left), seen=seen)
            try:
                repo.put_record(announcement_key(run, number), record)
            except Conflict:
                (found,) = _fetch(repo, run, [number])  # somebody else has it, and it may tell of the same
                _add(known, run, number, found)
            else:
                repo.catalogue.add_records({announcement_key(run, number): records.encode(record)})
                known.add(number, record)
            left = _unannounced(known, left)


def fill(repo: Repository, run: str, number: int) -> None:
    """Put an announcement of nothing where one is missing, so that nobody stops there. Raises `StorageError`."""
    with suppress(Conflict):  # it is there, and cannot be read
        repo.put_record(announcement_key(run, number), Announced(time=repo.clock(), announced=[]))


def runs(repo: Repository) -> list[str]:
    """Return the hashes of all runs. Raises `StorageError`."""
    repo.check_exists()
    _, folders = repo.storage.list_folder(PREFIX.rstrip("/"))
    found = (parse_announcement(f"{folder}/000000/000") for folder in folders)
    return sorted(name[0] for name in found if name is not None)


def are_there_any(repo: Repository) -> bool:
    """Tell whether any run has an announcement; a folder without one is none. Raises `StorageError`."""
    return any(parse_announcement(entry.key) for entry in repo.storage.list(PREFIX))


def _unannounced(known: RunCache, wanted: Iterable[Announcement]) -> list[Announcement]:
    return [(txid, number) for txid, number in wanted if known.announced.get(txid, -1) < number]


def _load(repo: Repository, run: str, known: RunCache) -> None:
    """Take note of what this host has read, once for each process."""
    if known.is_loaded:
        return
    known.is_loaded = True
    for key, data in repo.catalogue.records(f"{run_folder(run)}/").items():
        name, found = parse_announcement(key), _decoded(run, key, data)
        if name is not None and isinstance(found, Announced):
            known.add(name[1], found)


def _head(repo: Repository, run: str) -> int:
    """Return the highest number of a run, -1 for none: of the first folder that holds any, the first name."""
    _, folders = repo.storage.list_folder(run_folder(run))
    for folder in sorted(folders):
        entries, _ = repo.storage.list_folder(folder)
        if names := [name for entry in entries if (name := parse_announcement(entry.key))]:
            return max(number for _, number in names)
    return -1


def _read_on(repo: Repository, run: str, known: RunCache) -> bool:
    """Read what comes behind the head, until there is none. False where the head is not what was read there before."""
    before = known.records.get(known.head)
    head, *found = _fetch(repo, run, (known.head, known.head + 1))
    if head is None or (isinstance(head, Announced) and before not in (None, head)):
        return False
    if before is None:
        _add(known, run, known.head, head)
    most, count = repo.storage.traits.requests, 1
    while None not in found:
        for one in found:
            _add(known, run, known.head + 1, one)
        count = min(2 * count, most)
        found = _fetch(repo, run, range(known.head + 1, known.head + 1 + count))
    for one in found[: found.index(None)]:
        _add(known, run, known.head + 1, one)
    return True


def _add(known: RunCache, run: str, number: int, found: Fetched) -> None:
    if isinstance(found, CasckptError):
        log.warning("%s says nothing: %s; commits/ is listed instead", announcement_key(run, number), found)
    known.add(number, found if isinstance(found, Announced) else None)


def _fetch(repo: Repository, run: str, numbers: Iterable[int]) -> list[Fetched]:
    """Read announcements, several at once, and let the host keep those that are new. Raises `StorageError`."""
    wanted, known = list(numbers), repo.runs[run].records
    keys = [announcement_key(run, number) for number in wanted]
    rows = list(in_parallel(repo.storage.traits.requests, partial(_get, repo), keys))
    found = [None if data is None else _decoded(run, key, data) for key, data in zip(keys, rows, strict=True)]
    held = {
        key: data
        for number, key, data, one in zip(wanted, keys, rows, found, strict=True)
        if isinstance(data, bytes) and isinstance(one, Announced) and number not in known
    }
    if held:
        repo.catalogue.add_records(held)
    return found


def _get(repo: Repository, key: str) -> bytes | CasckptError | None:
    try:
        return repo.storage.get(key, limit=MAX_RECORD_BYTES)
    except NotFound:
        return None
    except (Damaged, Refused) as error:
        repo.storage.size(key)  # raises if a folder above it is a file: then no number is free, and none can be read
        return error


def _decoded(run: str, key: str, data: bytes | CasckptError) -> Announced | CasckptError:
    if isinstance(data, CasckptError):
        return data
    try:
        found: Announced = records.decode(data, Announced, key)
        fits = all(parse_txid(txid).run_hash == run for txid, _ in found.announced)
    except (Damaged, Refused) as error:
        return error
    return found if fits else Refused(f"{key} is not usable: it tells of another run", key=key)
