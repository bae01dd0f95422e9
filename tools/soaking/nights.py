"""Clouds at night: a process with a proxy in front of the server that refuses, throttles, delays, and falls silent.

While all workers rest, the proxy only forwards requests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from soaking.books import Books
from tests.support.proxy import Proxy

SKEW = 25 * 60 * 10**6  # microseconds: two clocks then differ by less than the slack of leases
OPTIONS = {"request_timeout": 5, "call_timeout": 20}
LONGEST, CALM = 5.0, 8.0  # seconds of a trouble, and between two troubles

TROUBLES: dict[str, Callable[[Proxy], None]] = {
    "burst of 503": lambda proxy: proxy.refuse("SlowDown"),
    "expired keys": lambda proxy: proxy.refuse("ExpiredToken"),
    "clock of the server": lambda proxy: proxy.refuse("RequestTimeTooSkewed"),
    "slow shard": lambda proxy: proxy.slow("*[0-3].safetensors", 1.0),
    "lost requests": lambda proxy: proxy.chaos(time.time_ns(), 0.3),
    "dead connections": Proxy.abandon,
    "silence": Proxy.mute,
}


def nights(proxy: Proxy, rest: Path, books: Books, drawn: random.Random) -> NoReturn:
    """Serve, with one random trouble after the other, except while the file ``rest`` exists."""
    with proxy:
        while True:
            name = drawn.choice(sorted(TROUBLES))
            if not rest.exists():
                TROUBLES[name](proxy)
                books.note("counts.0", did=f"night: {name}")
                _wait(drawn.uniform(1, LONGEST), rest)
            proxy.calm()
            proxy.seen.clear()  # otherwise, it would grow for hours
            _wait(drawn.uniform(1, CALM), rest)


def _wait(seconds: float, rest: Path) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not rest.exists():
        time.sleep(0.05)
    time.sleep(0.05)
