"""A process that is killed, or left without an answer, before or after one of its changes to a storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from casckpt.errors import StorageError
from casckpt.storage.base import ObjectStore
from tests.support.faulty import FaultyStore
from tests.support.tally import tally

WAYS = ["killed before", "killed after", "no answer before", "no answer after"]
_CHANGES = {"put", "replace", "delete"}


class Killed(BaseException):
    """The process is gone."""


class Dying(FaultyStore):
    """Fails at its change number ``at``; a process that is killed there makes no call after it."""

    def __init__(self, inner: ObjectStore, at: int, way: str) -> None:
        super().__init__(inner)
        self.at, self.way, self.changes = at, way, 0

    @contextmanager
    def faults(self, method: str, key: str) -> Iterator[set[object]]:  # type: ignore[override]  # there are none
        if self.way.startswith("killed") and self.changes >= self.at:
            raise Killed
        self.changes += method in _CHANGES
        is_now = method in _CHANGES and self.changes == self.at
        if is_now:
            tally(f"change of a storage: {self.way}")
        if is_now and self.way.endswith("before"):
            raise Killed if self.way.startswith("killed") else StorageError("no answer")
        yield set()
        if is_now:
            raise Killed if self.way.startswith("killed") else StorageError("no answer")
