"""Saves in the background, one at a time: what waits, what is refused, and how a failure is heard of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

from casckpt.contents.checkpoint import Checkpoint
from casckpt.saving.exit_status import unheard
from casckpt.tensors.staging import Staging


class SaveFuture(Future[Checkpoint]):
    """The checkpoint to be. It cannot be cancelled: other ranks would wait for this one."""

    def __init__(self) -> None:
        super().__init__()
        self.name = object()
        self.awaited = False  # whoever waits hears of a failure, though perhaps not yet
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The checkpoint, once it is durable and visible. Raises what the save raised."""
        self.awaited = True
        try:
            return super().result(timeout)
        finally:
            self._heard()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save raised, if it did."""
        self.awaited = True
        try:
            return super().exception(timeout)
        finally:
            self._heard()

    def _heard(self) -> None:
        if self.done():
            unheard.pop(self.name, None)
        self.awaited = False


class Background:
    """One thread at a time, and the memory for one copy of a state, for one process. ``lock``: held to begin a save."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.staging = Staging()
        self._last: SaveFuture | None = None

    @property
    def busy(self) -> bool:
        """Whether a save runs."""
        return self._last is not None and not self._last.done()

    def wait(self) -> None:
        """Until no save runs."""
        if self._last is not None:
            wait([self._last])

    def unheard(self) -> BaseException | None:
        """The error of the save that was waited for, if nobody has asked its future; once."""
        last = self._last
        return None if last is None or last.awaited or last.name not in unheard else last.exception()

    def submit(self, call: Callable[[], Checkpoint]) -> SaveFuture:
        """Run ``call``; after `wait`. Where no thread is to be had, the caller runs it."""
        future = self._last = SaveFuture()

        def run() -> None:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                unheard[future.name] = str(error)
                future.set_exception(error)
            else:
                future.set_result(found)

        try:
            _Saving(target=run, name="casckpt-async").start()
        except RuntimeError:
            run()
        return future


class _Saving(threading.Thread):
    """A save in the background; a program that ends waits for it."""


def _end_saves() -> None:
    """The program ends: let what still runs end before."""
    for thread in threading.enumerate():
        if isinstance(thread, _Saving):
            thread.join()


# Not by `atexit`, which comes when Python has waited for the threads itself; and before it does that, it forbids all
# pools of threads to work on, without which the clients of buckets cannot. Of these functions the last one goes first.
with suppress(AttributeError, RuntimeError):  # nobody promised that there is this one; or the program is ending already
    threading._register_atexit(_end_saves)  # type: ignore[attr-defined] # see above
