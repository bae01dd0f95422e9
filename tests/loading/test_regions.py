"""Windows contain every element once, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.dtypes import itemsize
from casckpt.frontends.views.recut import ViewTensor
from casckpt.loading import regions
from tests.support.safetensors_files import streams

some_streams = st.lists(st.tuples(st.sampled_from(["uint8", "float32", "float64"]), st.integers(0, 300))).map(streams)


@given(given_streams=some_streams, most=st.integers(8, 500), cell=st.sampled_from([8, 64, 1024]))
def test_windows_contain_every_element_once_in_order(given_streams: list[ViewTensor], most: int, cell: int) -> None:
    sources = [source for one in given_streams for source in one.sources]
    planned = list(regions.plan_windows(sources, most, cell))
    pieces = [piece for window in planned for piece in window]
    assert all(planned)
    assert max((sum(piece.nbytes for piece in window) for window in planned), default=0) <= most
    found = [(piece.entry.number, index) for piece in pieces for index in range(piece.lo, piece.hi)]
    assert found == [(one.entry.number, index) for one in given_streams for index in range(one.entry.numel)]
    for piece in pieces:
        size = itemsize(piece.entry.dtype)
        cut = piece.hi * size
        assert piece.hi == piece.entry.numel or cut % cell == 0 or most < cell
