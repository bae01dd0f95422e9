from __future__ import annotations

import tracemalloc
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format.encodings.frames import MIN_CELL, WORTH, Form, decode, encode_planes
from casckpt.format.encodings.parts import KEPT, Bytes, scratch
from tests.format.encodings.test_frames import WRONG, cells, decoded, frame_of
from tests.support import plain_reader
from tests.support.coded import encode

RAW2 = bytes.fromhex("01 02 01 00 06000000  00 03000000 02 05 ff  01 01000000 7f")


ZEROS = (1, b"\0")


WINDOW = bytes.fromhex("28b52ffd 00 68 4d00001000000100fb2ac002")
"""512 zeros, by a writer who may look back over 2**23 bytes."""


PLAIN = 512


SUMMED = bytes.fromhex("28b52ffd6400014d00001000000100fb2ac0027cb8c3e8")
"""512 zeros, and their checksum behind them."""


@pytest.mark.parametrize("coded", [WINDOW, SUMMED])
def test_zstd_data_from_any_writer_is_read(coded: bytes) -> None:
    assert decoded(frame_of(1, 1, PLAIN, (2, coded)), PLAIN) == bytes(PLAIN)


@pytest.mark.parametrize("what", ["a bomb", "very many changes", "very many gaps"])
def test_a_decompression_bomb_does_not_allocate_memory(what: str) -> None:
    into = bytearray(PLAIN)
    tracemalloc.start()
    with pytest.raises(Refused):
        decode(memoryview(WRONG[what]), memoryview(into), memoryview(into))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


WIDTHS = st.sampled_from([1, 2, 4, 8])


SEEDS = st.integers(0, 2**32 - 1)


COUNTS = st.integers(MIN_CELL, 9_000) | st.sampled_from([17_001, 1 << 16, (1 << 16) + 1, 131_077])


MATTER = ["zeros", "constant", "random", "ramp", "normal", "positive", "special", "small"]


def by_hand(frame: bytes, plain: bytes, base: bytes = b"") -> bytes:
    """Decode a frame of a cell as long as ``plain`` with the reader of docs/format.md."""
    return plain_reader.decoded(frame, len(plain), base)


@given(cells())
def test_elements_encoded_in_planes_decode_to_the_same_elements(cell: tuple[bytes, int]) -> None:
    plain, width = cell
    frame = encode(memoryview(plain), width, None)
    assert frame == encode_planes(memoryview(plain), width)
    if frame is not None:
        assert Form(frame[0]) == Form.PLANES
        assert len(frame) <= WORTH * len(plain)
        assert decoded(frame, len(plain)) == plain == by_hand(frame, plain)


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
