"""Columns are decoded as they were encoded, need few bytes, and are refused if malformed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format.sections.columns import pack, unpack


@given(st.lists(st.integers(0, 2**62), max_size=20))
def test_a_column_decodes_as_encoded(values: list[int]) -> None:
    assert unpack(pack(values)) == values


@pytest.mark.parametrize(("top", "width"), [(0, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**32, 8), (2**62, 8)])
def test_a_column_is_as_narrow_as_possible(top: int, width: int) -> None:
    assert pack([0, top])[0] == width
    assert len(pack([0, top])) == 1 + 2 * width


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\3abc", b"\2abc", b"\x08" + b"\xff" * 8, b"\x08" + (2**62 + 1).to_bytes(8, "little"), b"\xff"],
)
def test_malformed_columns_are_rejected(data: bytes) -> None:
    with pytest.raises(Refused, match="a column of the manifest"):
        unpack(data)


@given(st.binary(max_size=40))
def test_arbitrary_bytes_decode_to_a_column_or_are_rejected(data: bytes) -> None:
    try:
        values = unpack(data)
    except Refused:
        return
    assert all(0 <= value <= 2**62 for value in values)
