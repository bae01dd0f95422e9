"""A process that dies, or gets no response, before or after one of its changes to storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from casckpt.errors import StorageError
from casckpt.storage.base import ObjectStore
from tests.support.faulty import FaultyStore, Kind
from tests.support.tally import tally

WAYS = ["killed before", "killed after", "no answer before", "no answer after"]
_CHANGES = {"put", "replace", "delete"}


class Killed(BaseException):
    """The simulated process has died."""


class Dying(FaultyStore):
    """Storage that fails at change number ``at``. A process that dies there makes no more calls.

    ``beside`` is a second storage object of the same process. The changes to both are counted together.
    """

    def __init__(self, inner: ObjectStore, at: int, way: str, beside: Dying | None = None) -> None:
        super().__init__(inner)
        self.at, self.way = at, way
        self._count: list[int] = [0] if beside is None else beside._count

    @property
    def changes(self) -> int:
        """Return the number of changes so far."""
        return self._count[0]

    @contextmanager
    def faults(self, method: str, key: str) -> Iterator[set[object]]:  # type: ignore[override]  # there are none
        if self.way.startswith("killed") and self.changes >= self.at:
            raise Killed
        self._count[0] += method in _CHANGES
        is_now = method in _CHANGES and self.changes == self.at
        if is_now:
            tally(f"change of a storage: {self.way}")
        if is_now and self.way.endswith("before"):
            raise Killed if self.way.startswith("killed") else StorageError("no answer")
        yield set()
        if is_now:
            raise Killed if self.way.startswith("killed") else StorageError("no answer")


class Deadly(FaultyStore):
    """Kills its process right before or right after a call. ``at`` counts both of these points."""

    def __init__(self, inner: ObjectStore, at: int = 0) -> None:
        super().__init__(inner)
        self.at, self.steps = at, 0

    @contextmanager
    def faults(self, method: str, key: str) -> Iterator[set[Kind]]:
        self._die()
        yield set()
        self._die()

    def _die(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            raise Killed
