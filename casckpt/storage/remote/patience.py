"""Time limits for servers: one for each request, and one for each storage call including its retries.

Only time without progress counts. The limit works like a leaky bucket. Waiting fills it, and each transferred byte
removes the time that the byte would take at the speed `SLOWEST`. As a result, a server that sends one byte per second
times out about as soon as a silent one, and a server faster than `SLOWEST` never times out.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from casckpt.errors import InvalidInput, Unsupported

SLOWEST = 64 << 10  # bytes per second for a request: a slower server counts as silent
_UNHEARD = 8 * SLOWEST  # for clients that do not report progress; 32 MiB must then arrive at twice the speed `SLOWEST`
_ANSWER = 1.0  # seconds: a response within this time does not count against its call
_HOPELESS = 4  # after a call without a response, the next call gets a request's time limit divided by this number
_OPTIONS = {"request": "request_timeout", "call": "call_timeout"}


@dataclass(frozen=True)
class Patience:
    """Seconds without progress until a ``request``, or a ``call`` with all its attempts, times out."""

    request: float = 60.0
    call: float = 180.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> tuple[Patience, dict[str, Any]]:
        """Split storage_options into a Patience and the other options. Raises InvalidInput."""
        given = {field: _seconds(name, options[name]) for field, name in _OPTIONS.items() if name in options}
        return cls(**given), {name: value for name, value in options.items() if name not in _OPTIONS.values()}


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidInput(f"{name} in storage_options must be a number of seconds above 0, not {value!r}")
    return float(value)


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from ``first`` to ``most`` seconds between ``attempts`` attempts.

    Each pause is randomly shortened by up to half, so that clients that failed together do not retry together.
    """

    attempts: int = 8
    first: float = 0.1
    most: float = 10.0
    chance: Callable[[], float] = random.random
    sleep: Callable[[float], None] = time.sleep

    def pauses(self) -> Iterator[float]:
        """Yield how many seconds to wait before the second attempt, the third, and so on."""
        for number in range(self.attempts - 1):
            yield min(self.most, self.first * 2**number) * (1 - self.chance() / 2)


class Call:
    """One storage call: its consecutive attempts and the pauses between them.

    ``hopeless``: the previous call has just timed out, so this one gets less time. It may be a cleanup after a failed
    save, for example.
    """

    def __init__(self, patience: Patience, *, hopeless: bool = False) -> None:
        part = patience.request / _HOPELESS
        self._seconds = min(part, patience.call) if hopeless else patience.call
        self._option = _OPTIONS["request" if hopeless and part < patience.call else "call"]
        self._hopeless = hopeless
        self._spent = 0.0

    @property
    def left(self) -> float:
        """Seconds until the call times out."""
        return self._seconds - self._spent

    def spend(self, seconds: float) -> None:
        """Subtract seconds from the remaining time."""
        self._spent += seconds

    @property
    def why(self) -> str:
        """The reason for the timeout."""
        if self._hopeless:
            before = "after an earlier timeout, this call had only"
            return f"{before} {self._seconds:g} s (limited by {self._option} in storage_options)"
        return f"no call waits longer than {self._seconds:g} s in total ({self._option} in storage_options)"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the context, count this thread's requests as part of this call."""
        token = _call.set(self)
        try:
            yield
        finally:
            _call.reset(token)


class PatientRequest:
    """One request within a call. Only one thread may use it at a time."""

    def __init__(
        self, call: Call, seconds: float, nbytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin the request. ``nbytes``: bytes that extend the limit, because their transfer reports no progress."""
        self._call, self._seconds, self._clock = call, seconds, clock
        self._unheard = nbytes / _UNHEARD
        self._waited, self._last = 0.0, clock()
        self.at_move: Callable[[], None] = lambda: None

    @property
    def waited(self) -> float:
        """The seconds that count against the limit."""
        return max(0.0, self._all_waited - self._unheard)

    @property
    def left(self) -> float:
        """Seconds until the request times out if no more bytes are transferred."""
        return min(self._seconds, self._call.left) + self._unheard - self._all_waited

    @property
    def _all_waited(self) -> float:
        return self._waited + self._clock() - self._last

    def moved(self, nbytes: int) -> None:
        """Record that bytes were received or sent."""
        self._waited, self._last = max(0.0, self._all_waited - nbytes / SLOWEST), self._clock()
        self.at_move()

    @property
    def why(self) -> str:
        """The reason for the timeout."""
        if self._call.left <= self._seconds:
            return self._call.why
        seconds = f"{self._seconds:g} s (request_timeout in storage_options)"
        return f"the server was silent, or slower than {SLOWEST >> 10} KiB/s, for {seconds}"


_call: ContextVar[Call] = ContextVar("call")
_request: ContextVar[PatientRequest] = ContextVar("request")


@contextmanager
def begin_request(patience: Patience, nbytes: int = 0) -> Iterator[PatientRequest]:
    """Begin a request in this thread's current call, or in a new call if there is none.

    ``nbytes``: see `PatientRequest`.
    """
    call = _call.get(None) or Call(patience)
    request = PatientRequest(call, patience.request, nbytes)
    done = False
    try:
        yield request
        done = True
    finally:
        call.spend(max(0.0, request.waited - _ANSWER * done))


@contextmanager
def reporting_to(request: PatientRequest) -> Iterator[None]:
    """Inside the context, make `moved` report to this request."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def moved(nbytes: int) -> None:
    """Record progress of the current task's or thread's request."""
    request = _request.get(None)
    if request is not None:
        request.moved(nbytes)


T = TypeVar("T")
_GRACE = 1.0  # seconds that a client has to end a canceled request


class Loop:
    """An event loop that runs in its own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: Patience) -> None:
        self._loop = loop
        self._patience = patience
        self._thread: int = asyncio.run_coroutine_threadsafe(_thread(), loop).result()

    def run(self, call: Coroutine[Any, Any, T], nbytes: int = 0) -> T:
        """Run one request. It is canceled if this thread is interrupted or if it times out.

        ``nbytes``: bytes that it transfers without reporting progress (see `PatientRequest`). Raises TimeoutError with
        the reason, and Unsupported if called in the loop's own thread, which would wait for itself.
        """
        if threading.get_ident() == self._thread:
            call.close()
            raise Unsupported("casckpt was called in fsspec's event loop thread, which would wait for itself")
        with begin_request(self._patience, nbytes) as request:
            future = asyncio.run_coroutine_threadsafe(_bounded(call, request), self._loop)
            try:
                return _result(future, request)
            except BaseException:
                future.cancel()
                raise


def _result(future: Future[T], request: PatientRequest) -> T:
    """Wait for a result, within the time limit even if the client ignores cancellation or the loop is blocked."""
    while not future.done():
        with suppress(TimeoutError):
            return future.result(max(request.left, 0.0) + _GRACE)
        if request.left < -_GRACE and not future.done():
            raise TimeoutError(f"the client did not finish a request in time; {request.why}")
    return future.result()


async def _bounded(call: Coroutine[Any, Any, T], request: PatientRequest) -> T:
    clock, limit = asyncio.get_running_loop().time, asyncio.timeout(request.left)

    def later() -> None:
        with suppress(RuntimeError):  # the request has already ended
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
