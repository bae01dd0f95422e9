"""The health section is decoded as it was encoded, and hostile content is refused."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format.sections.columns import pack
from casckpt.format.sections.health import (
    CellHealth,
    HealthColumns,
    decode_health,
    encode_health,
    joined,
    rows_of,
    sum_of,
)

CELLS = st.builds(
    CellHealth, st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.floats(0, allow_infinity=False, allow_nan=False)
)
ENTRIES = st.dictionaries(st.integers(0, 99), st.lists(CELLS, max_size=5), max_size=5)


@given(ENTRIES)
def test_health_decodes_as_encoded(entries: dict[int, list[CellHealth]]) -> None:
    given = {number: rows_of(entries[number]) for number in sorted(entries)}
    found = decode_health(encode_health(given), 100)
    assert {number: rows.tolist() for number, rows in found.items()} == {n: rows.tolist() for n, rows in given.items()}


@given(ENTRIES)
def test_the_total_health_includes_all_cells(entries: dict[int, list[CellHealth]]) -> None:
    cells = [cell for one in entries.values() for cell in one]
    found = sum_of(joined(map(rows_of, entries.values())))
    most = max((cell.largest for cell in cells), default=0)
    assert found == (sum(cell.nan for cell in cells), sum(cell.inf for cell in cells), most)


GOOD = {
    "entries": pack([0, 2]),
    "cells": pack([1, 2]),
    "nan": pack([0, 1, 0]),
    "inf": pack([0, 0, 0]),
    "largest": np.array([1.0, 2.0, 3.0]).tobytes(),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"entries": pack([0])},
        {"entries": pack([2, 0])},
        {"entries": pack([2, 2])},
        {"entries": pack([0, 3])},
        {"cells": pack([1, 1])},
        {"nan": pack([0, 1])},
        {"inf": b"\3\0\0\0"},
        {"largest": b"\0" * 23},
        {"largest": np.array([1.0, np.nan, 3.0]).tobytes()},
        {"largest": np.array([1.0, -1.0, 3.0]).tobytes()},
        {"cells": pack([1, 2**40])},
    ],
)
def test_malformed_health_is_rejected(wrong: dict[str, bytes]) -> None:
    decode_health(msgspec.msgpack.encode(HealthColumns(**GOOD)), 3)
    with pytest.raises(Refused, match=r"health|column"):
        decode_health(msgspec.msgpack.encode(HealthColumns(**GOOD | wrong)), 3)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_decoded_or_rejected(data: bytes) -> None:
    with suppress(Refused):
        decode_health(data, 3)
