"""Items are divided into groups of limited size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.groups import in_batches


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_groups_keep_the_order_of_items_and_exceed_the_limit_only_for_a_single_item(
    sizes: list[int], most: int
) -> None:
    found = list(in_batches(sizes, lambda size: size, most))
    assert [size for lot in found for size in lot] == sizes
    assert all(lot and (sum(lot) <= most or len(lot) == 1) for lot in found)
