"""Garbage collection in the processes of tests, which import hundreds of thousands of objects."""

from __future__ import annotations

import gc


def collect_less() -> None:
    """Exclude all present objects from garbage collections, and collect others less often.

    A full collection takes half a second with the objects of torch, and a tenth without them.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
