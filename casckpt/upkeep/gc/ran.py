"""The note about the last gc that has finished. Nothing depends on it."""

from __future__ import annotations

from contextlib import suppress

from casckpt.errors import CasckptError
from casckpt.format.keys import parse_numbered, ran_key
from casckpt.format.records import Ran
from casckpt.repository.repository import Repository


def note_gc(repo: Repository, *, waiting: int, refused: int, opened: int) -> None:
    """Record that a gc has finished, and delete older notes. See `Ran`. A failure is no failure of the gc."""
    record = Ran(time=repo.clock(), who=repo.who, waiting=waiting, refused=refused, opened=opened)
    with suppress(CasckptError):
        older = _numbers(repo)
        repo.put_record(ran_key(max(older, default=-1) + 1), record)
        for number in older:
            repo.storage.delete(ran_key(number))


def last_gc(repo: Repository) -> Ran | None:
    """Return the newest note, or None if there is none.

    Raises `NotFound` if there is no store, `Damaged`, `Refused`, and `StorageError`.
    """
    repo.check_exists()
    numbers = _numbers(repo)
    return repo.get_record(ran_key(max(numbers)), Ran) if numbers else None


def _numbers(repo: Repository) -> list[int]:
    found = (parse_numbered(entry.key) for entry in repo.storage.list("ran/", known=parse_numbered))
    return [number for number in found if number is not None]
