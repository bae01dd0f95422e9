from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.format.sections.index import Entry
from casckpt.frontends.views.recut import ViewTensor, recut


def tensor(name: str, *shape: int, number: int = 0, dtype: str = "float32") -> ViewTensor:
    return ViewTensor(name, Entry("tensor", name, 0, None, dtype, 4, shape, number))


def test_a_tensor_is_split_into_parts() -> None:
    parts = {r"\1.q": [[0, 8]], r"\1.k": [[8, 10]], r"\1.v": [[10, 12]]}
    q, k, v = recut([tensor("h.0.qkv.weight", 12, 5)], {r"(.*)\.qkv\.weight": parts})
    assert [(p.name, p.entry.shape) for p in (q, k, v)] == [
        ("h.0.q", (8, 5)), ("h.0.k", (2, 5)), ("h.0.v", (2, 5))
    ]  # fmt: skip
    assert [(s.lo, s.hi) for p in (q, k, v) for s in p.sources] == [(0, 40), (40, 50), (50, 60)]


def test_a_split_that_is_no_rule_is_rejected() -> None:
    for pattern, name, match in (("(", "a", "not a regular expression"), ("x", r"\3", "not a replacement")):
        with pytest.raises(InvalidInput, match=match):
            recut([tensor("x", 4, 2)], {pattern: {name: []}})


@given(rows=st.lists(st.integers(1, 4), min_size=1, max_size=4), width=st.integers(1, 3))
def test_parts_of_a_part_are_parts_of_the_tensor(rows: list[int], width: int) -> None:
    names = {f"p{n}": [span] for n, span in enumerate(pairwise(accumulate(rows, initial=0)))}
    apart = recut([tensor("x", sum(rows), width)], {"x": names})
    again = recut(apart, {r"p(\d+)": {r"q\1": [[0, 1]]}})
    spans = [(s.lo, s.hi) for part in again for s in part.sources]
    assert spans == [(lo * width, (lo + 1) * width) for lo, _ in pairwise(accumulate(rows, initial=0))]


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    data=st.data(),
)
def test_an_index_selects_the_same_elements_as_in_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    index: list[Any] = []
    for extent in shape[: data.draw(st.integers(0, len(shape)))]:
        lo = data.draw(st.integers(0, extent - 1))
        index.append(lo if data.draw(st.booleans()) else [lo, data.draw(st.integers(lo + 1, extent))])
    whole = np.arange(prod(shape)).reshape(shape)
    expected = whole[tuple(one if isinstance(one, int) else slice(*one) for one in index)]
    (part,) = recut([tensor("x", *shape)], {"x": {"p": index}})
    assert part.entry.shape == expected.shape
    assert [at for source in part.sources for at in range(source.lo, source.hi)] == list(expected.ravel())


@pytest.mark.parametrize(
    "parts",
    [
        {"a": [4]},
        {"a": [[0, 5]]},
        {"a": [-1]},
        {"a": [[-1, 2]]},
        {"a": [[1, 1]]},
        {"a": [0, 0, 0]},
        {"a": [0], "b": [0], "c": [], "d": []},
    ],
    ids=["number", "range", "negative number", "negative range", "empty", "dimensions", "elements"],
)
def test_a_view_with_indices_outside_a_tensor_is_rejected(parts: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="has no part"):
        recut([tensor("x", 4, 2)], {"x": parts})


def test_parts_with_equal_names_are_not_joined() -> None:
    split = {"x(.*)": {"a": [[0, 2]], r"a\1": [[2, 4]]}}
    assert [one.name for one in recut([tensor("x", 4)], split)] == ["a", "a"]
