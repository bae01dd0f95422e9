"""Calls of asynchronous clients in the thread of fsspec's event loop; all of them end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from casckpt.errors import Unsupported
from casckpt.storage.remote.patience import Patience, PatientRequest, begin_request, reporting_to

T = TypeVar("T")
_GRACE = 1.0  # seconds in which a client has to end what was given up


class Loop:
    """An event loop that runs in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: Patience) -> None:
        self._loop = loop
        self._patience = patience
        self._thread: int = asyncio.run_coroutine_threadsafe(_thread(), loop).result()

    def run(self, call: Coroutine[Any, Any, T], nbytes: int = 0) -> T:
        """Run one request, which is stopped where this thread is interrupted, and when patience ends.

        ``nbytes``: that it moves without a word (see `patience`). Raises TimeoutError saying why it was
        given up, and Unsupported in the loop's own thread, which would wait for itself.
        """
        if threading.get_ident() == self._thread:
            call.close()
            raise Unsupported("casckpt was called in the thread of fsspec's event loop, which would wait for itself")
        with begin_request(self._patience, nbytes) as one:
            future = asyncio.run_coroutine_threadsafe(_bounded(call, one), self._loop)
            try:
                return _result(future, one)
            except BaseException:
                future.cancel()
                raise


def _result(future: Future[T], one: PatientRequest) -> T:
    """Wait for a result, and keep the time: clients may hold on to what they do, and hooks may block the loop."""
    while not future.done():
        with suppress(TimeoutError):
            return future.result(max(one.left, 0.0) + _GRACE)
        if one.left < -_GRACE and not future.done():
            raise TimeoutError(f"the client does not let go of what was given up: {one.why}")
    return future.result()


async def _bounded(call: Coroutine[Any, Any, T], one: PatientRequest) -> T:
    clock, limit = asyncio.get_running_loop().time, asyncio.timeout(one.left)

    def later() -> None:
        with suppress(RuntimeError):  # it is over
            limit.reschedule(clock() + one.left)

    one.at_move = later
    try:
        async with limit:
            with reporting_to(one):
                return await call
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(one.why) from error
        raise


async def _thread() -> int:
    return threading.get_ident()
