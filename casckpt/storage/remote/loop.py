"""Calls of asynchronous clients in the thread of fsspec's event loop, with a time limit."""

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
_GRACE = 1.0  # seconds that a client has to end a cancelled request


class Loop:
    """An event loop that runs in its own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: Patience) -> None:
        self._loop = loop
        self._patience = patience
        self._thread: int = asyncio.run_coroutine_threadsafe(_thread(), loop).result()

    def run(self, call: Coroutine[Any, Any, T], nbytes: int = 0) -> T:
        """Run one request. It is cancelled if this thread is interrupted, or when its time is over.

        ``nbytes``: bytes that it moves without reporting progress (see `PatientRequest`). Raises TimeoutError with the
        reason, and Unsupported in the loop's own thread, which would wait for itself.
        """
        if threading.get_ident() == self._thread:
            call.close()
            raise Unsupported("casckpt was called in the thread of fsspec's event loop, which would wait for itself")
        with begin_request(self._patience, nbytes) as request:
            future = asyncio.run_coroutine_threadsafe(_bounded(call, request), self._loop)
            try:
                return _result(future, request)
            except BaseException:
                future.cancel()
                raise


def _result(future: Future[T], request: PatientRequest) -> T:
    """Wait for a result within the time limit, even if the client ignores the cancellation or the loop is blocked."""
    while not future.done():
        with suppress(TimeoutError):
            return future.result(max(request.left, 0.0) + _GRACE)
        if request.left < -_GRACE and not future.done():
            raise TimeoutError(f"the client did not end a request in time: {request.why}")
    return future.result()


async def _bounded(call: Coroutine[Any, Any, T], request: PatientRequest) -> T:
    clock, limit = asyncio.get_running_loop().time, asyncio.timeout(request.left)

    def later() -> None:
        with suppress(RuntimeError):  # the request has ended
            limit.reschedule(clock() + request.left)

    request.at_move = later
    try:
        async with limit:
            with reporting_to(request):
                return await call
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(request.why) from error
        raise


async def _thread() -> int:
    return threading.get_ident()
