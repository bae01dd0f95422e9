from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.encodings.frames import (
    MIN_CELL,
    WORTH,
    Form,
    encode,
    encode_planes,
    form_of,
)
from tests.format.encodings.test_frames import cells, decoded
from tests.support import plain_reader

WIDTHS = st.sampled_from([1, 2, 4, 8])


SEEDS = st.integers(0, 2**32 - 1)


COUNTS = st.integers(MIN_CELL, 9_000) | st.sampled_from([17_001, 1 << 16, (1 << 16) + 1, 131_077])


MATTER = ["zeros", "constant", "random", "ramp", "normal", "positive", "special", "small"]


def by_hand(frame: bytes, plain: bytes, base: bytes = b"") -> bytes:
    """What the document's reader makes of the frame of a cell as long as ``plain``."""
    return plain_reader.decoded(frame, len(plain), base)


@given(cells())
def test_planes_decode_to_the_same_elements(cell: tuple[bytes, int]) -> None:
    plain, width = cell
    frame = encode(memoryview(plain), width, None)
    assert frame == encode_planes(memoryview(plain), width)
    if frame is not None:
        assert form_of(memoryview(frame)) == Form.PLANES
        assert len(frame) <= WORTH * len(plain)
        assert decoded(frame, len(plain)) == plain == by_hand(frame, plain)
