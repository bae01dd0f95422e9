"""Trying again: how often, and how long to wait in between."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


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
        """Seconds to wait before the second attempt, the third, and so on."""
        for number in range(self.attempts - 1):
            yield min(self.most, self.first * 2**number) * (1 - self.chance() / 2)
