"""Saves in the background, one at a time: what waits, what is refused, and how a failure is heard of."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock

from casckpt.checkpoint.handle import Checkpoint
from casckpt.tensors.staging import Staging

log = logging.getLogger(__name__)


class SaveFuture(Future[Checkpoint]):
    """The checkpoint to be. It cannot be cancelled: other ranks would wait for this one."""

    def __init__(self) -> None:
        super().__init__()
        self.name = object()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The checkpoint, once it is durable and visible. Raises what the save raised."""
        try:
            return super().result(timeout)
        finally:
            self._heard()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save raised, if it did."""
        try:
            return super().exception(timeout)
        finally:
            self._heard()

    def _heard(self) -> None:
        if self.done():
            _unheard.pop(self.name, None)


class Background:
    """One thread, and the memory for one copy of a state, both for one process. ``lock``: held to begin a save."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="casckpt-async")
        self._last: SaveFuture | None = None

    @property
    def busy(self) -> bool:
        """Does a save run?"""
        return self._last is not None and not self._last.done()

    def wait(self) -> None:
        """Until no save runs."""
        if self._last is not None:
            wait([self._last])

    def unheard(self) -> BaseException | None:
        """The error of the save that was waited for, if nobody has asked its future; once."""
        return self._last.exception() if self._last is not None and self._last.name in _unheard else None

    def submit(self, call: Callable[[], Checkpoint]) -> SaveFuture:
        """Run ``call``; after `wait`."""
        future = self._last = SaveFuture()

        def run() -> None:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                _unheard[future.name] = str(error)
                future.set_exception(error)
            else:
                future.set_result(found)

        self._thread.submit(run)
        return future


_unheard: dict[object, str] = {}
"""What failed, by the names of the futures that nobody asked. No futures: their errors hold the state that was saved,
and the store of one may be gone before the program ends."""


@atexit.register
def _tell_unheard() -> None:
    """The program ends: no next call will raise what failed last."""
    for why in _unheard.values():
        log.error("the last save in the background failed, and nobody asked its future: %s", why)
