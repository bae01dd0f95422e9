"""Nested dicts and lists, by example. `test_against_core` compares the results with Megatron-core's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from casckpt.frontends.megatron import (
    CheckpointingException,
    ShardedObject,
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    inspect_types,
    map_reduce,
    merge,
    nested_items_iter,
    nested_values,
)


def nested() -> dict[str, Any]:
    return {"a": 1, "b": [2, {"c": 3}], "d": {}, "e": (4, 5)}


def is_odd(value: Any) -> bool:
    return isinstance(value, int) and value % 2 == 1


def test_leaves_are_in_order_and_tuples_are_leaves() -> None:
    x = nested()
    assert list(nested_values(x)) == [1, 2, 3, (4, 5)]
    assert [(key, value) for _, key, value in nested_items_iter(x)] == [("a", 1), (0, 2), ("c", 3), ("e", (4, 5))]
    assert next(iter(nested_items_iter(x["b"])))[0] is x["b"]


def test_maps_work_in_place_and_into_new_containers() -> None:
    x = nested()
    assert dict_list_map_outplace(str, x) == {"a": "1", "b": ["2", {"c": "3"}], "d": {}, "e": "(4, 5)"}
    assert x == nested()
    inner = x["b"]
    assert dict_list_map_inplace(str, x) is x
    assert x["b"] is inner == ["2", {"c": "3"}]
    assert dict_list_map_inplace(str, 5) == dict_list_map_outplace(str, 5) == "5"


def test_dict_map_enters_lists_and_passes_the_innermost_key() -> None:
    x = nested()
    assert dict_map(str, x) is None  # type: ignore[func-returns-value] # that is what is tested
    assert x["b"] == ["2", {"c": "3"}]
    y = nested()
    dict_map_with_key(lambda key, value: (key, value), y)
    assert y == {"a": ("a", 1), "b": [(0, 2), {"c": ("c", 3)}], "d": {}, "e": ("e", (4, 5))}


def test_map_reduce_groups_values_before_it_reduces_them() -> None:
    assert map_reduce([1, 2, 3, 4], lambda x: x % 2, lambda x: x * 10, sum) == {1: 40, 0: 60}
    assert map_reduce([1, 1, 2]) == {1: [1, 1], 2: [2]}


def test_merge_writes_the_second_dict_into_the_first() -> None:
    x: dict[str, Any] = {"a": {"b": 1}, "l": [{"p": 1}, {"p": 2}]}
    assert merge(x, {"a": {"c": 2}, "l": [{"q": 3}, {}], "n": [4]}) is x
    assert x == {"a": {"b": 1, "c": 2}, "l": [{"p": 1, "q": 3}, {"p": 2}], "n": [4]}


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [({"a": {"b": 1}}, {"a": {"b": 1}}, r"\('a', 'b'\)"), ({"a": [1]}, {"a": [1, 2]}, r"\('a',\)"), ([1], {}, r"\(\)")],
)
def test_merge_rejects_two_values_for_the_same_position(one: Any, other: Any, where: str) -> None:
    with pytest.raises(CheckpointingException, match=where) as caught:
        merge(one, other)
    assert isinstance(caught.value, ValueError)


def test_extract_splits_and_closes_the_gaps_of_lists() -> None:
    x = {"a": 1, "b": [2, 3, [4]], "c": {"d": 5, "e": 6}, "f": {}, "g": [], "h": [{}]}
    odd, rest = extract_matching_values(x, is_odd)
    assert odd == {"a": 1, "b": [3], "c": {"d": 5}}
    assert rest == {"b": [2, [4]], "c": {"e": 6}, "f": {}, "g": [], "h": [{}]}
    odd, rest = extract_matching_values(x, is_odd, return_lists_as_dicts=True)
    assert odd == {"a": 1, "b": {1: 3}, "c": {"d": 5}}
    assert rest["b"] == {0: 2, 2: {0: 4}}


def test_extract_calls_the_predicate_for_an_empty_container_in_a_list() -> None:
    assert extract_matching_values([{}, []], lambda value: value == {}) == ([{}], [[]])


def test_extract_rejects_tuples() -> None:
    with pytest.raises(ValueError, match="tuple"):
        extract_matching_values((1, 2), is_odd)


def test_diff_returns_paths_and_types() -> None:
    left, right, mismatch = diff({"a": 1, "b": {"c": 2, "x": 0}}, {"b": {"c": "2", "y": 0}, "d": 3})
    assert (left, right) == ([("a",), ("b", "x")], [("d",), ("b", "y")])
    assert mismatch == [(("b", "c"), int, str)]


def test_diff_of_lists_returns_bare_indices_on_both_sides() -> None:
    assert diff({"l": [1, 2, 3]}, {"l": [1]}) == ([2, 1], [], [])
    assert diff((1,), (1, 2)) == ([], [1], [])
    assert diff(np.array([1, 2]), np.array([1, 3])) == ([], [], [((1,), np.int64, np.int64)])
    assert diff([1], (1,)) == ([], [], [((), list, tuple)])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
        (torch.ones(2), torch.ones(1), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False),
        (ShardedObject("a", 1, (1,), (0,)), ShardedObject("b", 1, (1,), (0,)), True),
        (ShardedObject("a", 1, (1,), (0,)), ShardedObject("a", 2, (1,), (0,)), False),
        (torch.ones(2), 1, False),
    ],
)
def test_diff_compares_the_values_of_leaves(one: Any, other: Any, equal: bool) -> None:
    assert (diff({"a": one}, {"a": other}) == ([], [], [])) is equal


def test_inspect_types_prints_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_types({"a": [torch.ones(2), "x" * 31, "y" * 30]})
    assert capsys.readouterr().out == (
        f"\n> a: \n    - 0: Tensor of shape torch.Size([2])\n    - 1: [<class 'str'>]: {'x' * 30}... (truncated)\n"
        f"    - 2: [<class 'str'>]: {'y' * 30}\n"
    )
