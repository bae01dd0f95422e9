"""A function over many items by several threads, with a bounded number of items in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
_WAITING = 4  # items for each thread: enough to keep it busy


def in_parallel(threads: int, function: Callable[[A], B], items: Iterable[A], *, name: str) -> Iterator[B]:
    """``function`` of every item, in order. The first error is raised, and what has not begun then is left out.

    ``name``: of the threads.
    """
    rest = iter(items)
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix=f"casckpt-{name}") as pool:
        pending = deque(pool.submit(function, item) for item in islice(rest, _WAITING * max(threads, 1)))
        try:
            while pending:
                done = pending.popleft().result()
                pending.extend(pool.submit(function, item) for item in islice(rest, 1))
                yield done
        finally:
            for future in pending:
                future.cancel()
