"""Announcements: the log of each run, in runs/. With it, readers find changes without listing commits/.

Before a writer creates a record in commits/, it announces the record at the next free number of its run. A reader that
knows the run up to N requests N + 1 and so on, until it finds a free number. At this point, it knows every transaction
that had a record when the read began. The state of each transaction is in its own log in commits/. The reader reads
this log by key. If an announced record is missing, the reader keeps the announcement, and rereads the log later. An
announcement alone never causes anything to be deleted or reused.

The host's catalogue keeps the announcements that were read. It does not keep any state derived from them, so the two
cannot diverge. tests/model/protocol/announcements.py explores the interleavings of readers and writers, and watching.py
those with a gc that deletes announcements.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from casckpt.base.groups import grouped
from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Damaged, NotFound, Refused
from casckpt.format import notes, records
from casckpt.format.keys import MARKER, announcement_key, parse_announcement, parse_txid, run_folder
from casckpt.format.names import TxId
from casckpt.format.records import Announced
from casckpt.history.ended import MIN_AGE, TRUSTED
from casckpt.repository.caches import RunCache
from casckpt.repository.reading import fetch_record
from casckpt.repository.repository import Repository

PREFIX = "runs/"
_AT_ONCE = 1000  # the maximum number of records in one announcement
_CHANGED = (
    "the store at %s was restored from a copy, or lost records: %s differs from what this host has read. casckpt "
    "discards everything that it cached about the store on this host"
)

log = logging.getLogger(__name__)

Fetched: TypeAlias = Announced | CasckptError | None
"""An announcement, the error raised while reading it, or None if it does not exist."""
Announcement: TypeAlias = tuple[TxId, int]
"""A transaction, and the number of a log record that a writer is about to create."""


def look(repo: Repository, run: str, *, anew: bool = False) -> RunCache:
    """Return a run's announcements, at least up to the highest one that exists when the call starts. ``run``: its hash.

    ``anew``: ignore the announcements in the host's catalogue, but use those in memory. For a known run, this takes
    two small requests, and one for each new announcement. For any other run, it takes two folder listings. Raises
    `NotFound` if the store does not exist, and `StorageError`.
    """
    repo.check_exists()
    known = repo.runs[run]
    with known.lock.get():
        if not anew:
            _load(repo, run, known)
        if known.head < 0:
            known.head = max(_numbers(repo, run, from_lowest=False), default=-1)
            return known
        if _read_on(repo, run, known):
            return known
        if _lowest(repo, run) > known.head and _is_same_store(repo):  # gc has deleted all that was read
            known.head = max(_numbers(repo, run, from_lowest=False))
            return known
    is_gone = repo.storage.size(MARKER) is None  # in this case, the save creates a new store, and logs it
    level = logging.INFO if is_gone else logging.WARNING
    log.log(level, _CHANGED, repo.storage.url, announcement_key(run, known.head))
    repo.forget_all(keep_marker=is_gone)
    return look(repo, run)


def read_back(repo: Repository, run: str, low: int = 0) -> RunCache:
    """Read all unread announcements, from ``low`` to the head. Call `look` first. Raises `StorageError`."""
    known = repo.runs[run]
    with known.lock.get():
        for count in (1, None):  # the lowest one first, because gc may have deleted it and many others
            numbers = known.unread(low)[::-1][:count]
            found = _fetch(repo, run, numbers)
            if None in found:
                _begin_at(repo, run, _lowest(repo, run))
            for number, record in zip(numbers, found, strict=True):
                if number >= known.low:
                    _add(known, run, number, NotFound("it is missing") if record is None else record)
    return known


def remove_over(repo: Repository, run: str, over: Container[TxId]) -> None:
    """Delete the announcements below the first one that is young, or names a transaction which is not ``over``.

    Keeps the newest one, because its number must not be used again. Call `read_back` first. Raises `StorageError`.
    """
    known, since = repo.runs[run], repo.clock() - MIN_AGE
    with known.lock.get():
        needed = (number for number, record in known.records.items() if _is_needed(record, over, since))
        first = min(needed, default=known.head)
        if first <= known.low:
            return
        # another gc may have deleted some of them
        for number in range(_lowest(repo, run), first):  # one by one, see `_is_deleted`
            repo.storage.delete(announcement_key(run, number))
        _begin_at(repo, run, first)


def _is_needed(record: Announced | None, over: Container[TxId], since: int) -> bool:
    """Return whether an announcement must stay. One that cannot be read may name anything."""
    return record is None or record.time > since or any(txid not in over for txid, _ in record.announced)


def _is_deleted(repo: Repository, run: str, number: int) -> bool:
    """Return whether gc has deleted an announcement. Makes no request if the announcement is too young.

    gc deletes the lowest one first. Therefore, if this one exists, gc had not deleted the next one before this call.
    """
    record = repo.runs[run].records.get(number)
    is_young = record is not None and record.time > repo.clock() - TRUSTED
    return not is_young and repo.storage.size(announcement_key(run, number)) is None


def _is_same_store(repo: Repository) -> bool:
    with suppress(NotFound):
        return repo.fresh().marker.store_id == repo.marker.store_id
    return False


def _begin_at(repo: Repository, run: str, low: int) -> None:
    """Note that gc has deleted all announcements below ``low``, on this host too."""
    known = repo.runs[run]
    known.low = low
    known.unreadable = {number for number in known.unreadable if number >= low}
    repo.catalogue.set_note(f"low of {run}", notes.encode(low))
    repo.catalogue.remove_records([(announcement_key(run, low - 1), f"{run_folder(run)}0")])


def announce(repo: Repository, announced: Iterable[Announcement], *, seen: int | None = None) -> None:
    """Announce records before they are created. Skip those that this process knows to be announced.

    ``seen``: the highest number when the save began. The save's txid is later than every transaction that was announced
    up to this number. Raises `StorageError`.
    """
    for run, of_run in grouped(announced, lambda one: parse_txid(one[0]).run_hash).items():
        for first in range(0, len(of_run), _AT_ONCE):
            _announce(repo, run, of_run[first : first + _AT_ONCE], seen)


def _announce(repo: Repository, run: str, wanted: Sequence[Announcement], seen: int | None) -> None:
    known = repo.runs[run]
    with known.lock.get():
        left = _unannounced(known, wanted)
        if left and seen is None:
            known = look(repo, run)  # never put a number after a gap: a different store may be at the URL
            left = _unannounced(known, wanted)
        while left:
            number = known.head + 1
            record = Announced(time=repo.clock(), announced=list(left), seen=seen)
            try:
                repo.put_record(announcement_key(run, number), record)
            except Conflict:
                # another writer used the number; it may announce the same records
                (taken,) = _fetch(repo, run, [number])
                _add(known, run, number, taken)
            else:
                if number and _is_deleted(repo, run, number - 1):
                    # this process slept. gc may have deleted this number too, so no reader would ask for it
                    known.head = max(_numbers(repo, run, from_lowest=False))
                    continue
                repo.catalogue.add_records({announcement_key(run, number): records.encode(record)})
                known.add(number, record)
            left = _unannounced(known, left)


def fill(repo: Repository, run: str, number: int) -> None:
    """Replace a missing announcement with an empty one, so that readers do not stop there. Raises `StorageError`."""
    with suppress(Conflict):  # it exists, but cannot be read
        repo.put_record(announcement_key(run, number), Announced(time=repo.clock(), announced=[]))


def runs(repo: Repository) -> list[str]:
    """Return the hashes of all runs. Raises `StorageError`."""
    repo.check_exists()
    _, folders = repo.storage.list_folder(PREFIX.rstrip("/"))
    names = (parse_announcement(f"{folder}/000000/000") for folder in folders)
    return sorted(name[0] for name in names if name is not None)


def are_there_any(repo: Repository) -> bool:
    """Return whether any run has an announcement. Empty folders do not count. Raises `StorageError`."""
    return any(parse_announcement(entry.key) for entry in repo.storage.list(PREFIX))


def _unannounced(known: RunCache, wanted: Iterable[Announcement]) -> list[Announcement]:
    return [(txid, number) for txid, number in wanted if known.announced.get(txid, -1) < number]


def _load(repo: Repository, run: str, known: RunCache) -> None:
    """Load the announcements that this host has read. Each process does this once."""
    if known.is_loaded:
        return
    known.is_loaded = True
    for key, data in repo.catalogue.records(f"{run_folder(run)}/").items():
        name, record = parse_announcement(key), _decoded(run, key, data)
        if name is not None and isinstance(record, Announced):
            known.add(name[1], record)
    head, names = notes.decode(repo.catalogue.note(names_note(run)), notes.NAMES) or (-1, [])
    known.low = notes.decode(repo.catalogue.note(f"low of {run}"), notes.NUMBER) or 0
    if head <= known.head:  # only then does `look` check that this is still the same store
        known.add_names(names, head)


def names_note(run: str) -> str:
    """Return the name of the note with the transactions of a run that were listed. ``run``: its hash."""
    return f"names of {run}"


def _lowest(repo: Repository, run: str) -> int:
    return min(_numbers(repo, run, from_lowest=True), default=0)


def _numbers(repo: Repository, run: str, *, from_lowest: bool) -> list[int]:
    """Return the numbers in the first folder of a run that has any. Folders sort by descending number."""
    _, folders = repo.storage.list_folder(run_folder(run))
    for folder in sorted(folders, reverse=from_lowest):
        entries, _ = repo.storage.list_folder(folder)
        if numbers := [name[1] for entry in entries if (name := parse_announcement(entry.key))]:
            return numbers
    return []


def _read_on(repo: Repository, run: str, known: RunCache) -> bool:
    """Read the announcements after the head.

    Return False if the head differs from what was read before, or if gc has deleted the last one.
    """
    before = known.records.get(known.head)
    head, *behind = _fetch(repo, run, (known.head, known.head + 1))
    if head is None or (isinstance(head, Announced) and before not in (None, head)):
        return False
    if before is None:
        _add(known, run, known.head, head)
    most, count = repo.storage.traits.requests, 1
    while None not in behind:
        for record in behind:
            _add(known, run, known.head + 1, record)
        count = min(2 * count, most)
        behind = _fetch(repo, run, range(known.head + 1, known.head + 1 + count))
    for record in behind[: behind.index(None)]:
        _add(known, run, known.head + 1, record)
    return not _is_deleted(repo, run, known.head)


def _add(known: RunCache, run: str, number: int, fetched: Fetched) -> None:
    if isinstance(fetched, CasckptError):
        log.warning("casckpt cannot read %s (%s), so it lists commits/ instead", announcement_key(run, number), fetched)
    known.add(number, fetched if isinstance(fetched, Announced) else None)


def _fetch(repo: Repository, run: str, numbers: Iterable[int]) -> list[Fetched]:
    """Read announcements in parallel, and add new ones to the catalogue. Raises `StorageError`."""
    wanted, known = list(numbers), repo.runs[run].records
    keys = [announcement_key(run, number) for number in wanted]
    rows = list(in_parallel(repo.storage.traits.requests, partial(_get, repo), keys))
    fetched = zip(keys, rows, strict=True)
    decoded = [None if isinstance(data, NotFound) else _decoded(run, key, data) for key, data in fetched]
    held = {
        key: data
        for number, key, data, record in zip(wanted, keys, rows, decoded, strict=True)
        if isinstance(data, bytes) and isinstance(record, Announced) and number not in known
    }
    if held:
        repo.catalogue.add_records(held)
    return decoded


def _get(repo: Repository, key: str) -> bytes | CasckptError:
    data = fetch_record(repo, key)
    if isinstance(data, Damaged | Refused):
        repo.storage.size(key)  # raises if a parent folder is a file, which makes every number unusable
    return data


def _decoded(run: str, key: str, data: bytes | CasckptError) -> Announced | CasckptError:
    if isinstance(data, CasckptError):
        return data
    try:
        record: Announced = records.decode(data, Announced, key)
        fits = all(parse_txid(txid).run_hash == run for txid, _ in record.announced)
    except (Damaged, Refused) as error:
        return error
    return record if fits else Refused(f"{key} is not valid: it lists transactions of a different run", key=key)
