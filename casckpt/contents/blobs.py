"""Blobs as objects of a store, and the marks on damaged ones."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError, Conflict, Revoked, StorageError
from casckpt.format.keys import blob_key, commit_key, damaged_key, parse_damaged, parse_object
from casckpt.format.names import BlobHash, TxId
from casckpt.format.records import DamageRecord
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.reading import Read, check_no_file, read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists, ListedObject

PREFIX = "damaged/"
DAMAGED, REPAIRED = "damaged", "repaired"
FRAMES = "frames"
"""Damaged, though all bytes are those that were written: a frame among them makes another cell than was saved."""
MAX_WHY_CHARACTERS = 500
_SAMPLE = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DamageMark:
    """The last word on a blob that was once marked. ``number``: of its record; ``why`` it was made."""

    uploader: TxId
    blob: BlobHash
    number: int
    state: str
    why: str


def put(repo: Repository, uploader: TxId, blob_hash: BlobHash, data: memoryview | bytes) -> None:
    """Write a blob under ``uploader``; one that is there already is ours. Its name is durable after ``settle``.

    Raises `StorageError`, also if there is one of another size (a put that went wrong on the server).
    """
    key, size = blob_key(uploader, blob_hash), memoryview(data).nbytes
    try:
        repo.storage.put(key, data, settle=False)
    except AlreadyExists:
        found = repo.storage.size(key)
        if found != size:
            message = f"{key} is there with {found} bytes instead of {size}; save again"
            raise StorageError(message, key=key, blob=blob_hash) from None
    repo.seen_blobs.add((uploader, blob_hash))


def check(repo: Repository, refs: Iterable[BlobRef]) -> list[BlobRef]:
    """Return those of ``refs`` that are missing or of another size. Raises `StorageError`. One small request for each.

    Over a network each is looked at once by a process, and later a sample.
    """
    wanted = list(dict.fromkeys(refs))
    if repo.storage.traits.remote:
        wanted = _worth_a_look(repo, wanted)
    keys = (blob_key(ref.uploader, ref.hash) for ref in wanted)
    sizes = in_parallel(repo.storage.traits.requests, repo.storage.size, keys)
    lost = [ref for ref, size in zip(wanted, sizes, strict=True) if size != ref.size]
    repo.seen_blobs.update((ref.uploader, ref.hash) for ref in wanted)
    repo.seen_blobs.difference_update((ref.uploader, ref.hash) for ref in lost)
    return lost


def check_reused(repo: Repository, txid: TxId, refs: Iterable[BlobRef]) -> list[BlobRef]:
    """Return those of ``refs``, which transaction ``txid`` reuses, that are not there as they were; marks them.

    Raises `Revoked` if a gc took the transaction for dead, and may have deleted them for that; `StorageError`.
    """
    lost = check(repo, refs)
    if lost and repo.storage.size(commit_key(txid)) is not None:
        raise Revoked("a gc took this for dead, and deleted what it reused; start again", key=commit_key(txid))
    for ref in lost:
        log.warning("blob %s is gone or cut short; its cells are stored again", ref.hash)
        mark_damaged(repo, ref.uploader, ref.hash, "missing or of another size when it was to be reused")
    return lost


def _worth_a_look(repo: Repository, refs: Sequence[BlobRef]) -> list[BlobRef]:
    """Return those that this process has not seen, and a few of the others."""
    seen = [ref for ref in refs if (ref.uploader, ref.hash) in repo.seen_blobs]
    again = set(Random(repo.entropy(8)).sample(seen, min(len(seen), _SAMPLE)))  # noqa: S311 - a sample, no secret
    return [ref for ref in refs if ref in again or (ref.uploader, ref.hash) not in repo.seen_blobs]


def marks(repo: Repository) -> list[DamageMark]:
    """Return the last mark of each blob that ever had one; an unreadable one says "damaged". Raises `StorageError`."""
    newest: dict[tuple[TxId, BlobHash], tuple[int, ListedObject]] = {}
    for entry in repo.storage.list(PREFIX, known=parse_damaged):
        name = parse_damaged(entry.key)
        if name is None:
            check_no_file(repo.storage.url, entry, parse_damaged)
        elif name[2] >= newest.get(name[:2], (-1, entry))[0]:
            newest[name[:2]] = (name[2], entry)
    entries = [entry for _, entry in newest.values()]
    found = read_records(repo, PREFIX, entries, lambda _: DamageRecord)
    return [_mark(blob, number, found[entry.key]) for blob, (number, entry) in newest.items()]


def damaged_marks(repo: Repository) -> set[tuple[TxId, BlobHash]]:
    """Return (uploader, blob) of the blobs whose last mark is not that of a repair. Raises `StorageError`."""
    return {(mark.uploader, mark.blob) for mark in marks(repo) if mark.state != REPAIRED}


def frame_marks(repo: Repository) -> set[tuple[TxId, BlobHash]]:
    """Return (uploader, blob) of those that are damaged by their frames alone. Raises `StorageError`."""
    return {(mark.uploader, mark.blob) for mark in marks(repo) if mark.state == FRAMES}


def mark_damaged(repo: Repository, uploader: TxId, blob: BlobHash, why: str, *, by_frames: bool = False) -> None:
    """Say that a blob is damaged, unless that was said: later saves do not reuse it. Raises `StorageError`.

    ``why``: for people; its first 500 characters are kept. ``by_frames``: its bytes are those that were written.
    """
    _mark_as(repo, uploader, blob, FRAMES if by_frames else DAMAGED, why)


def mark_repaired(repo: Repository, uploader: TxId, blob: BlobHash, why: str) -> None:
    """Say that a marked blob is whole again. Nothing is done if it is not marked. Raises `StorageError`."""
    _mark_as(repo, uploader, blob, REPAIRED, why)


def remove_marks(repo: Repository, deleted: Collection[str]) -> None:
    """Remove all marks of what was ``deleted`` (keys) because nothing needs it: no key is ever used again.

    Raises `StorageError`.
    """
    names = {(name.uploader, name.hash) for key in deleted if (name := parse_object(key))}
    for entry in list(repo.storage.list(PREFIX, known=parse_damaged)) if names else ():
        mark = parse_damaged(entry.key)
        if mark is not None and mark[:2] in names:
            repo.storage.delete(entry.key)


def _mark_as(repo: Repository, uploader: TxId, blob: BlobHash, state: str, why: str) -> None:
    while True:
        number, present = _present(repo, uploader, blob)
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
        try:
            repo.put_record(damaged_key(uploader, blob, number + 1), record)
        except Conflict:
            continue  # somebody else had a word just now: it is read, and ours is the next one if it still matters
        return


def _present(repo: Repository, uploader: TxId, blob: BlobHash) -> tuple[int, str]:
    """Return (number, state) of the last mark on one blob."""
    entries = repo.storage.list(f"{PREFIX}{uploader}/{blob}/", known=parse_damaged)
    names = {entry: name for entry in entries if (name := parse_damaged(entry.key))}
    if not names:
        return -1, REPAIRED
    newest = max(names, key=lambda entry: names[entry][2])
    found = read_records(repo, newest.key, [newest], lambda _: DamageRecord)[newest.key]
    mark = _mark((uploader, blob), names[newest][2], found)
    return mark.number, mark.state


def _mark(name: tuple[TxId, BlobHash], number: int, record: Read) -> DamageMark:
    if isinstance(record, CasckptError):
        return DamageMark(*name, number, DAMAGED, f"its mark cannot be read: {record}")
    fits = (record.uploader, record.blob) == name and record.state in {REPAIRED, FRAMES}
    return DamageMark(*name, number, record.state if fits else DAMAGED, record.why)
