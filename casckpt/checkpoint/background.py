"""Saves in the background, one at a time: what waits, what is refused, and how a failure is heard of."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Final

from casckpt.checkpoint.ending import end_badly, watch_exits
from casckpt.checkpoint.handle import Checkpoint
from casckpt.tensors.staging import Staging

log = logging.getLogger(__name__)
_UNHEARD: Final = "the last save in the background failed, and nobody asked its future: %s"


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
            _unheard.pop(self.name, None)
        self.awaited = False


class Background:
    """One thread at a time, and the memory for one copy of a state, for one process. ``lock``: held to begin a save."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.staging = Staging()
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
        last = self._last
        return None if last is None or last.awaited or last.name not in _unheard else last.exception()

    def submit(self, call: Callable[[], Checkpoint]) -> SaveFuture:
        """Run ``call``; after `wait`. Where no thread is to be had, the caller runs it."""
        watch_exits()
        future = self._last = SaveFuture()

        def run() -> None:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                _unheard[future.name] = str(error)
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


_unheard: dict[object, str] = {}
"""What failed, by the names of the futures that nobody asked. No futures: their errors hold the state that was saved,
and the store of one may be gone before the program ends."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unheard.clear)  # it is for the parent to tell


def _end_saves() -> None:
    """The program ends: let what still runs end before."""
    for thread in threading.enumerate():
        if isinstance(thread, _Saving):
            thread.join()


# Not by `atexit`, which comes when Python has waited for the threads itself; and before it does that, it forbids all
# pools of threads to work on, without which the clients of buckets cannot. Of these functions the last one goes first.
with suppress(AttributeError, RuntimeError):  # nobody promised that there is this one; or the program is ending already
    threading._register_atexit(_end_saves)  # type: ignore[attr-defined] # see above


@atexit.register
def _tell_unheard() -> None:
    """The program ends: no next call will raise what failed last. It shall not look as if all went well."""
    for why in _unheard.values():
        log.error(_UNHEARD, why)
        if log.hasHandlers() and sys.stderr is not None:  # they may lead anywhere; without any it goes there anyway
            sys.stderr.write(f"casckpt: {_UNHEARD % why}\n")
    if _unheard:
        end_badly()
