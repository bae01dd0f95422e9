"""Storage with a clock of its own, which a test advances, and that no client can change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from casckpt.storage.base import Known, ListedObject, ObjectStore
from tests.support.faulty import FaultyStore
from tests.support.repositories import Ticks


class TimedStore(FaultyStore):
    """``inner`` with the time of each object, when this storage first saw it. Call `look` after others put."""

    def __init__(self, inner: ObjectStore, clock: Ticks) -> None:
        super().__init__(inner)
        self.clock = clock
        self.times: dict[str, int] = {}

    def look(self) -> None:
        """Note the time of new objects."""
        for _ in self.list(""):
            pass

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        super().put(key, data, settle=settle)
        self.times.setdefault(key, self.clock.now)

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        for entry in super().list(prefix, known=known):
            yield replace(entry, time=self.times.setdefault(entry.key, self.clock.now))
