"""Buffers and their pool."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from casckpt.errors import InvalidInput
from casckpt.storage import buffers
from casckpt.storage.base import BLOCK
from casckpt.storage.buffers import AlignedBuffer, BufferPool, KeptBuffers, address, plain_bytes
from tests.support.killed_saves import forked


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 3 << 20])
def test_a_buffer_is_aligned_and_zeroed(nbytes: int) -> None:
    with AlignedBuffer(nbytes) as buffer:
        assert address(buffer.view) % BLOCK == 0
        assert address(buffer.view[1:]) % BLOCK == (1 if nbytes > 1 else 0)
        assert buffer.nbytes == buffer.view.nbytes == nbytes
        assert bytes(buffer.view) == bytes(nbytes)
        assert not buffer.view.readonly


def test_a_buffer_with_a_view_can_be_closed() -> None:
    buffer = AlignedBuffer(10)
    array = np.frombuffer(buffer.view, np.uint8)
    buffer.close()
    assert array.sum() == 0
    with pytest.raises(ValueError, match="released"):
        _ = buffer.view


def test_a_forked_child_sees_only_zeros_in_buffers_and_frees_nothing(tmp_path: Path) -> None:
    with AlignedBuffer(3 << 20) as buffer:
        buffer.wipe_in_forks()
        buffer.at_end((tmp_path / "ended").touch)
        buffer.view[:] = bytes([7]) * buffer.nbytes

        def child() -> None:
            assert bytes(buffer.view) == bytes(buffer.nbytes)
            arrays = [np.full(1 << 20, 5) for _ in range(8)]
            buffer.close()
            assert all((array == 5).all() for array in arrays)

        assert forked(child) == 0
        assert set(buffer.view) == {7}
        assert list(tmp_path.iterdir()) == []
    assert (tmp_path / "ended").exists()


def test_a_dropped_buffer_is_freed(tmp_path: Path) -> None:
    buffer = AlignedBuffer(1)
    buffer.at_end((tmp_path / "ended").touch)
    del buffer
    gc.collect()
    assert (tmp_path / "ended").exists()


def test_a_buffer_whose_preparation_failed_is_not_used() -> None:
    def fail(buffer: AlignedBuffer) -> None:
        raise MemoryError

    pool = BufferPool(1, 10, fail)
    for _ in range(3):
        with pytest.raises(MemoryError), pool.borrow():
            pass
    pool.close()


def test_invalid_sizes_are_rejected() -> None:
    for make in (lambda: AlignedBuffer(0), lambda: BufferPool(0, 1), lambda: BufferPool(1, 0)):
        with pytest.raises(InvalidInput, match="at least 1"):
            make()


def test_conversion_to_plain_bytes_does_not_copy_memory() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    view = plain_bytes(array.data)
    assert (view.format, view.shape, address(view)) == ("B", (12,), array.ctypes.data)


def test_a_pool_reuses_buffers() -> None:
    pool = BufferPool(2, 100)
    with pool.borrow() as first, pool.borrow() as second:
        assert first is not second
    with pool.borrow() as again, pool.borrow() as more:
        assert {id(again), id(more)} == {id(first), id(second)}


def test_the_number_of_buffers_in_a_pool_is_limited() -> None:
    pool = BufferPool(3, 10)
    lock = threading.Lock()
    out: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with pool.borrow() as buffer:
            with lock:
                out.append(number)
                most.append(len(out))
            buffer.view[:] = bytes([number % 256]) * 10
            assert set(buffer.view) == {number % 256}
            with lock:
                out.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(500)))
    assert max(most) <= 3


def test_the_pool_waits_until_a_buffer_is_released() -> None:
    pool = BufferPool(1, 10)
    order: list[str] = []

    def wait() -> None:
        with pool.borrow() as got:
            order.append("borrowed")
            assert got is buffer

    thread = threading.Thread(target=wait)
    with pool.borrow() as buffer:
        thread.start()
        order.append("given back")
    thread.join()
    assert order == ["given back", "borrowed"]


def test_a_buffer_is_returned_to_the_pool_after_an_error() -> None:
    pool = BufferPool(1, 10)
    with pytest.raises(ZeroDivisionError), pool.borrow() as buffer:
        _ = 1 / 0
    with pool.borrow() as again:
        assert again is buffer


def test_closing_a_pool_wakes_waiting_threads() -> None:
    pool = BufferPool(2, 10)
    with ThreadPoolExecutor(1) as threads, ExitStack() as held:
        out = [held.enter_context(pool.borrow()) for _ in range(2)]
        waiting = threads.submit(lambda: pool.borrow().__enter__())
        pool.close()
        with pytest.raises(InvalidInput, match="closed"):
            waiting.result()
        assert out[0].view.nbytes == 10
    for one in out:
        with pytest.raises(ValueError, match="released"):
            _ = one.view


def test_the_pool_closes_idle_buffers() -> None:
    pool = BufferPool(1, 10)
    with pool.borrow() as buffer:
        pass
    pool.close()
    with pytest.raises(ValueError, match="released"):
        _ = buffer.view


def test_idle_buffers_are_kept_for_smaller_requests() -> None:
    kept = KeptBuffers()
    with kept.pool(2, 100) as first:
        pass
    for count, nbytes in ((2, 100), (1, 7)):
        with kept.pool(count, nbytes) as again:
            assert again is first
    for count, nbytes in ((3, 100), (2, 101)):
        with kept.pool(count, nbytes) as other:
            assert other is not first
            assert (other.count, other.nbytes) == (count, nbytes)


def test_simultaneous_transfers_do_not_share_buffers() -> None:
    kept = KeptBuffers()
    with kept.pool(1, 10) as first, kept.pool(1, 10) as second:
        assert first is not second
    with kept.pool(1, 10) as later:
        assert later is first  # it was released last


def test_a_failed_transfer_leaves_its_buffers_usable() -> None:
    kept = KeptBuffers()
    with pytest.raises(ValueError, match="mine"), kept.pool(1, 10) as pool, pool.borrow():
        raise ValueError("mine")
    with kept.pool(1, 10) as again, again.borrow() as buffer:
        assert again is pool
        assert buffer.nbytes == 10


def test_buffers_beyond_the_limit_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "KEPT_BYTES", 100)
    kept = KeptBuffers()
    with kept.pool(2, 51) as pool:
        pass
    with pytest.raises(InvalidInput), pool.borrow():
        pass
    with kept.pool(2, 50) as small:
        pass
    with kept.pool(2, 50) as again:
        assert again is small
