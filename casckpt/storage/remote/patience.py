"""Limits of waiting for servers: for each request, and for each call of a storage with all that it tries again.

Only time in which nothing comes or goes counts; a slow server that makes progress is waited for. The bound is kept by a
leaky bucket: waiting fills it, and each byte that moves lets out the time that it takes at `SLOWEST`. So one that is
silent is given up on as soon as one that sends a byte a second, and one that is faster than `SLOWEST` never is.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from casckpt.errors import InvalidInput

SLOWEST = 64 << 10  # bytes a second: who is slower, by each request, counts as silent
_UNHEARD = 8 * SLOWEST  # where a client does not tell how far it is: with a call's own time, twice `SLOWEST` for 32 MiB
_ANSWER = 1.0  # seconds: a request that was answered within them takes nothing from its call
_HOPELESS = 4  # a server that was silent for a whole call is asked once more for this part of a request's time
_OPTIONS = {"request": "request_timeout", "call": "call_timeout"}


@dataclass(frozen=True)
class Patience:
    """Seconds without progress until a ``request`` is given up, and until a ``call`` is, with all its attempts."""

    request: float = 60.0
    call: float = 180.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> tuple[Patience, dict[str, Any]]:
        """Read storage_options; return the options that are left, too. Raises InvalidInput."""
        given = {field: _seconds(name, options[name]) for field, name in _OPTIONS.items() if name in options}
        return cls(**given), {name: value for name, value in options.items() if name not in _OPTIONS.values()}


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidInput(f"{name} in storage_options is a number of seconds above 0, not {value!r}")
    return float(value)


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from ``first`` to ``most`` seconds between ``attempts`` attempts.

    Each is shortened by up to half at random, so that many clients that failed together do not come back together.
    """

    attempts: int = 8
    first: float = 0.1
    most: float = 10.0
    chance: Callable[[], float] = random.random
    sleep: Callable[[float], None] = time.sleep

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before the second attempt, the third, and so on."""
        for number in range(self.attempts - 1):
            yield min(self.most, self.first * 2**number) * (1 - self.chance() / 2)


class Call:
    """One call of a storage: its attempts, one after the other, and the pauses between them.

    ``hopeless``: the call before was given up a moment ago. A save that fails still has some to make, to clear up.
    """

    def __init__(self, patience: Patience, *, hopeless: bool = False) -> None:
        part = patience.request / _HOPELESS
        self._seconds = min(part, patience.call) if hopeless else patience.call
        self._option = _OPTIONS["request" if hopeless and part < patience.call else "call"]
        self._hopeless = hopeless
        self._spent = 0.0

    @property
    def left(self) -> float:
        """Seconds."""
        return self._seconds - self._spent

    def spend(self, seconds: float) -> None:
        """Take them off what is left."""
        self._spent += seconds

    @property
    def why(self) -> str:
        """Why it is given up."""
        if self._hopeless:
            before = "the server was silent before, so it was waited for"
            return f"{before} {self._seconds:g} s only (by {self._option} in storage_options)"
        return f"no call waits for more than {self._seconds:g} s in all ({self._option} in storage_options)"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make requests of this thread part of it, inside."""
        token = _call.set(self)
        try:
            yield
        finally:
            _call.reset(token)


class PatientRequest:
    """One request of a call, from its beginning; used by one thread at a time."""

    def __init__(
        self, call: Call, seconds: float, nbytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin. ``nbytes``: that move without a word of it, for which there is more time."""
        self._call, self._seconds, self._clock = call, seconds, clock
        self._unheard = nbytes / _UNHEARD
        self._waited, self._last = 0.0, clock()
        self.at_move: Callable[[], None] = lambda: None

    @property
    def waited(self) -> float:
        """Seconds that count."""
        return max(0.0, self._all_waited - self._unheard)

    @property
    def left(self) -> float:
        """Seconds until it is given up, if nothing moves."""
        return min(self._seconds, self._call.left) + self._unheard - self._all_waited

    @property
    def _all_waited(self) -> float:
        return self._waited + self._clock() - self._last

    def moved(self, nbytes: int) -> None:
        """Note that so many bytes came or went."""
        self._waited, self._last = max(0.0, self._all_waited - nbytes / SLOWEST), self._clock()
        self.at_move()

    @property
    def why(self) -> str:
        """Why it is given up."""
        if self._call.left <= self._seconds:
            return self._call.why
        seconds = f"{self._seconds:g} s (request_timeout in storage_options)"
        return f"the server was silent, or slower than {SLOWEST >> 10} KiB/s, for {seconds}"


_call: ContextVar[Call] = ContextVar("call")
_request: ContextVar[PatientRequest] = ContextVar("request")


@contextmanager
def begin_request(patience: Patience, nbytes: int = 0) -> Iterator[PatientRequest]:
    """Begin a request of the call that this thread is in, else of a new call. ``nbytes``: see `PatientRequest`."""
    call = _call.get(None) or Call(patience)
    one = PatientRequest(call, patience.request, nbytes)
    done = False
    try:
        yield one
        done = True
    finally:
        call.spend(max(0.0, one.waited - _ANSWER * done))


@contextmanager
def reporting_to(one: PatientRequest) -> Iterator[None]:
    """Let `moved` speak of this request inside."""
    token = _request.set(one)
    try:
        yield
    finally:
        _request.reset(token)


def moved(nbytes: int) -> None:
    """Note how far the request of this task or thread has got."""
    one = _request.get(None)
    if one is not None:
        one.moved(nbytes)
