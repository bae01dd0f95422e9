"""Blobs as objects in a store, and the marks on damaged blobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Revoked, StorageError
from casckpt.format.keys import blob_key, commit_key, damaged_key, parse_damaged, parse_object
from casckpt.format.names import BlobHash, TxId
from casckpt.format.records import DamageRecord
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.exclusive import check_listed
from casckpt.repository.reading import Read, check_no_file, read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists, ListedObject

PREFIX = "damaged/"
DAMAGED, REPAIRED = "damaged", "repaired"
MAX_WHY_CHARACTERS = 500
_SAMPLE = 16
_Placed = TypeVar("_Placed")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DamageMark:
    """The latest mark of a blob. ``number``: the number of its record. ``why``: the reason, as a string."""

    uploader: TxId
    blob: BlobHash
    number: int
    state: str
    why: str


def put(repo: Repository, uploader: TxId, blob_hash: BlobHash, data: memoryview | bytes) -> None:
    """Write a blob under ``uploader``.

    A blob that already exists counts as success. The blob is durable after ``settle``. Raises `StorageError`, for
    example if a blob of a different size exists (after a put that failed on the server).
    """
    key, size = blob_key(uploader, blob_hash), memoryview(data).nbytes
    try:
        repo.storage.put(key, data, settle=False)
    except AlreadyExists:
        found = repo.storage.size(key)
        if found is None:  # a gc that revoked this save deleted what another process had put
            repo.storage.put(key, data, settle=False)
        elif found != size:
            message = f"{key} exists with {found} bytes instead of {size}; save again"
            raise StorageError(message, key=key, blob=blob_hash) from None
    repo.seen_blobs.add((uploader, blob_hash))


def check(repo: Repository, refs: Iterable[BlobRef]) -> list[BlobRef]:
    """Return the ``refs`` that are missing or have a different size. This takes one small request per blob.

    On remote storage, a process checks each blob once, and after that only a sample. Raises `StorageError`.
    """
    wanted = list(dict.fromkeys(refs))
    if repo.storage.traits.remote:
        wanted = _unseen_and_sample(repo, wanted)
    keys = (blob_key(ref.uploader, ref.hash) for ref in wanted)
    sizes = in_parallel(repo.storage.traits.requests, repo.storage.size, keys)
    lost = [ref for ref, size in zip(wanted, sizes, strict=True) if size != ref.size]
    repo.seen_blobs.update((ref.uploader, ref.hash) for ref in wanted)
    repo.seen_blobs.difference_update((ref.uploader, ref.hash) for ref in lost)
    return lost


def store(
    repo: Repository,
    txid: TxId,
    place: Callable[[], _Placed],
    reused: Callable[[_Placed], Iterable[BlobRef]],
    exclude: Callable[[Collection[BlobRef]], None],
) -> _Placed:
    """Call ``place`` until every blob that its result reuses exists, and return this result.

    ``place``: stores in transaction ``txid`` whatever has no place yet. ``reused``: returns the blobs that a result
    names. ``exclude``: stops the reuse of lost blobs, and takes their contents out of their places. The names of new
    blobs are durable after a `settle`.

    Raises `Revoked` if gc has revoked the transaction and may have deleted blobs. Raises `StorageError`.
    """
    while True:
        placed = place()
        refs = dict.fromkeys(ref for ref in reused(placed) if ref.uploader != txid)
        lost = _check_reused(repo, txid, refs)
        if not lost:
            break
        exclude(lost)
    if repo.cache_saves:
        for ref in refs:
            repo.blob_cache.touch(ref)
    return placed


def _check_reused(repo: Repository, txid: TxId, refs: Iterable[BlobRef]) -> list[BlobRef]:
    """Return the ``refs`` that are missing or truncated, and mark them."""
    lost = check(repo, refs)
    if lost and repo.storage.size(commit_key(txid)) is not None:
        raise Revoked(
            "gc assumed that this save was dead, and deleted blobs that the save reused; save again",
            key=commit_key(txid),
        )
    for ref in lost:
        log.warning("blob %s is missing or truncated; this save stores its cells again", ref.hash)
        mark_damaged(repo, ref.uploader, ref.hash, "it was missing or had the wrong size when a save tried to reuse it")
    return lost


def _unseen_and_sample(repo: Repository, refs: Sequence[BlobRef]) -> list[BlobRef]:
    """Return the blobs that this process has not seen, and a sample of those that it has seen."""
    seen = [ref for ref in refs if (ref.uploader, ref.hash) in repo.seen_blobs]
    again = set(Random(repo.entropy(8)).sample(seen, min(len(seen), _SAMPLE)))  # noqa: S311 - a sample, not a secret
    return [ref for ref in refs if ref in again or (ref.uploader, ref.hash) not in repo.seen_blobs]


def marks(repo: Repository, prefix: str = PREFIX) -> list[DamageMark]:
    """Return the latest mark of each blob that is marked under ``prefix``. Raises `StorageError`.

    An unreadable mark counts as damaged.
    """
    newest: dict[tuple[TxId, BlobHash], tuple[int, ListedObject]] = {}
    for entry in repo.storage.list(prefix, known=parse_damaged):
        name = parse_damaged(entry.key)
        if name is None:
            check_no_file(repo.storage.url, entry, parse_damaged)
        elif name[2] >= newest.get(name[:2], (-1, entry))[0]:
            newest[name[:2]] = (name[2], entry)
    records = read_records(repo, prefix, [entry for _, entry in newest.values()], lambda _: DamageRecord)
    return [_mark(blob, number, records[entry.key]) for blob, (number, entry) in newest.items()]


def damaged_marks(repo: Repository) -> set[tuple[TxId, BlobHash]]:
    """Return (uploader, blob) for each blob whose latest mark says that it is damaged. Raises `StorageError`."""
    return {(mark.uploader, mark.blob) for mark in marks(repo) if mark.state != REPAIRED}


def mark_damaged(repo: Repository, uploader: TxId, blob: BlobHash, why: str) -> None:
    """Mark a blob as damaged unless it is already marked. Later saves do not reuse it. Raises `StorageError`.

    ``why``: the reason, of which the first 500 characters are kept.
    """
    _mark_as(repo, uploader, blob, DAMAGED, why)


def mark_repaired(repo: Repository, uploader: TxId, blob: BlobHash, why: str) -> None:
    """Mark a damaged blob as repaired. Has no effect if it is not marked as damaged. Raises `StorageError`."""
    _mark_as(repo, uploader, blob, REPAIRED, why)


def remove_marks(repo: Repository, deleted: Collection[str]) -> None:
    """Remove all marks of the blobs with the keys ``deleted``, which gc has just deleted. Raises `StorageError`."""
    names = {(name.uploader, name.hash) for key in deleted if (name := parse_object(key))}
    for entry in list(repo.storage.list(PREFIX, known=parse_damaged)) if names else ():
        mark = parse_damaged(entry.key)
        if mark is not None and mark[:2] in names:
            repo.storage.delete(entry.key)


def _mark_as(repo: Repository, uploader: TxId, blob: BlobHash, state: str, why: str) -> None:
    while True:
        latest = marks(repo, f"{PREFIX}{uploader}/{blob}/")
        number, present = (latest[0].number, latest[0].state) if latest else (-1, REPAIRED)
        if present == state:
            return
        record = DamageRecord(
            uploader=uploader,
            blob=blob,
            state=state,
            time=repo.clock(),
            why=why[:MAX_WHY_CHARACTERS],
            unique=repo.entropy(8).hex(),
        )
        key = damaged_key(uploader, blob, number + 1)
        try:
            repo.put_record(key, record)
        except Conflict:  # another process has just added a mark: read it, and add this mark after it if they differ
            check_listed(repo.storage, key)
            continue
        return


def _mark(name: tuple[TxId, BlobHash], number: int, record: Read) -> DamageMark:
    if isinstance(record, CasckptError):
        return DamageMark(*name, number, DAMAGED, f"casckpt cannot read the blob's damage mark: {record}")
    fits = (record.uploader, record.blob) == name and record.state == REPAIRED
    return DamageMark(*name, number, REPAIRED if fits else DAMAGED, record.why)
