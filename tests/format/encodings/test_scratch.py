"""Scratch belongs to one thread, is reused, and is freed if it is large."""

from __future__ import annotations

from threading import Thread

import numpy as np

from casckpt.format.encodings.scratch import KEPT, Bytes, scratch


def test_scratch_memory_is_reused() -> None:
    first = scratch("test", 1000)
    assert first.size == 1000
    assert np.shares_memory(first, scratch("test", 10))
    assert not np.shares_memory(first, scratch("another", 10))


def test_large_scratch_memory_is_not_kept() -> None:
    assert not np.shares_memory(scratch("test", KEPT + 1), scratch("test", KEPT + 1))
    assert np.shares_memory(scratch("test", KEPT), scratch("test", KEPT))


def test_threads_do_not_share_scratch_memory() -> None:
    found: list[Bytes] = []
    other = Thread(target=lambda: found.append(scratch("test", 10)))
    other.start()
    other.join()
    assert not np.shares_memory(found[0], scratch("test", 10))
