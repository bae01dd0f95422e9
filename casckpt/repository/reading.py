"""Cached reads of immutable records: each host reads each record once.

Also checks whether this version of casckpt meets the store's requirements for writers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Damaged, NotFound, Refused
from casckpt.format import records
from casckpt.format.records import MAX_RECORD_BYTES, Settings
from casckpt.repository.repository import Repository
from casckpt.storage.base import Known, ListedObject

Read: TypeAlias = Any | CasckptError
"""A record, or the error raised while reading it."""

_BELOW = ("/0", f"/{'0' * 64}/0")


def read_records(
    repo: Repository, prefix: str, entries: Iterable[ListedObject], kind_of: Callable[[str], Any], *,
    anew: bool = False, lasting: bool = True,
) -> dict[str, Read]:  # fmt: skip
    """Return the record or the error for each listed key under ``prefix`` ("commits/").

    A record is read only once, unless the listing shows a different size or version than this process or the catalogue
    has. In that case, the store was restored from a copy and has changed since. ``anew``: reread all records, to check
    that they are intact. ``lasting``: whether the catalogue keeps them, although a record may soon be deleted.

    Raises `StorageError`, and `NotFound` if there is no store.
    """
    repo.check_exists()
    entries = list(entries)
    held = {} if anew else {entry.key: repo.records.get(entry) for entry in entries}
    rest = [entry for entry in entries if held.get(entry.key) is None]
    if not rest:
        return held
    known = {} if anew or not lasting else repo.catalogue.records(prefix, min(entry.key for entry in rest))
    rows = {entry.key: row_of(entry) for entry in rest}
    hits = {entry.key: data for entry in rest if len(data := known.get(rows[entry.key], b"")) == entry.size > 0}
    misses = [entry.key for entry in rest if entry.key not in hits]
    fetched = in_parallel(repo.storage.traits.requests, lambda key: fetch_record(repo, key), misses)
    fresh = dict(zip(misses, fetched, strict=True))
    decoded = {key: _decoded(data, kind_of(key), key) for key, data in (hits | fresh).items()}
    whole = {
        k: v for k, v in (hits | fresh).items() if isinstance(v, bytes) and not isinstance(decoded[k], CasckptError)
    }
    for entry in rest:
        if entry.key in whole:
            repo.records.add(replace(entry, size=len(whole[entry.key])), decoded[entry.key])
    if lasting and (new := {rows[key]: data for key, data in whole.items() if key in fresh}):
        repo.catalogue.add_records(new)
    return held | decoded


def row_of(entry: ListedObject) -> str:
    """Return a record's catalogue key. It includes the version if the storage has versions."""
    return f"{entry.key} {entry.version}"


def key_of(row: str) -> str:
    """Return the key of the record in a row of the catalogue."""
    return row.partition(" ")[0]


def check_no_file(url: str, entry: ListedObject, known: Known) -> None:
    """Raise `Refused` if ``entry``, which is not a record, is where a folder of records should be."""
    if any(known(entry.key + below) is not None for below in _BELOW):
        raise Refused(
            f"{url}/{entry.key} is a file where a folder of records should be: restore the folder from a copy of "
            "the store, or move the file out of the store",
            key=entry.key,
        )


def fetch_record(repo: Repository, key: str) -> bytes | CasckptError:
    """Return a record's bytes, or the error raised while reading it. Raises `StorageError`."""
    try:
        return repo.storage.get(key, limit=MAX_RECORD_BYTES)
    except (NotFound, Damaged, Refused) as error:
        return _detached(error)


def read_record(repo: Repository, key: str, kind: Any) -> Read:
    """Return the record under a key, or the error raised while reading it. Raises `StorageError`."""
    try:
        return repo.get_record(key, kind)
    except (NotFound, Damaged, Refused) as error:
        return _detached(error)


def _detached(error: CasckptError) -> CasckptError:
    """Return the error without the frames in which it was raised, because it is returned as a value.

    From Python 3.13 on, these frames would lead to the caller's frame, which holds the error. Such a cycle keeps all
    variables of all callers, such as the state that is being saved, until the garbage collector runs.
    """
    error.__context__ = error.__traceback__ = None
    return error


def _decoded(data: bytes | CasckptError, kind: Any, key: str) -> Read:
    if isinstance(data, CasckptError):
        return data
    try:
        return records.decode(data, kind, key)
    except (Damaged, Refused) as error:
        return error


PREFIX = "settings/"


def check_requirements(repo: Repository) -> Settings:
    """Return the settings. Raises `Unsupported` if they contain a requirement that this version does not know.

    Raises `NotFound` if the store does not exist, `StorageError`, and `Damaged` or `Refused` if the settings cannot be
    read.
    """
    repo.check_exists()
    numbers = repo.numbered(PREFIX)
    if not numbers:
        return Settings(created_at=0)
    newest = numbers[max(numbers)]
    found = read_records(repo, PREFIX, [newest], lambda _: Settings)[newest.key]
    settings = repo.settings if isinstance(found, CasckptError) else found
    records.check_requirements(settings, repo.storage.url)
    return settings
