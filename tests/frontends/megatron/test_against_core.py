"""casckpt's functions and Megatron-core's return equal results for equal input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.frontends import megatron
from tests.support.megatron_core import core

LEAVES = st.integers(0, 9) | st.sampled_from(["x", "y", (1, 2)])


NESTED = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)


TOP = st.dictionaries(st.sampled_from("abc"), NESTED, max_size=3) | st.lists(NESTED, max_size=3)


@pytest.fixture(scope="module")
def dicts() -> Any:
    return core(".dict_utils")


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*copy.deepcopy(arguments))
    except (ValueError, AssertionError):
        return ValueError


def is_even(value: Any) -> bool:
    return isinstance(value, int) and value % 2 == 0


@given(x=TOP, as_dicts=st.booleans())
def test_extract_matching_values_behaves_as_in_megatron_core(dicts: Any, x: Any, as_dicts: bool) -> None:
    assert megatron.extract_matching_values(x, is_even, as_dicts) == dicts.extract_matching_values(x, is_even, as_dicts)


@given(x=TOP, y=TOP)
def test_merge_behaves_as_in_megatron_core(dicts: Any, x: Any, y: Any) -> None:
    assert outcome(megatron.merge, x, y) == outcome(dicts.merge, x, y)


@given(x=TOP, y=TOP)
def test_diff_behaves_as_in_megatron_core(dicts: Any, x: Any, y: Any) -> None:
    theirs = outcome(dicts.diff, x, y)
    if theirs is not ValueError:  # Megatron-core asserts that a list is not merged with a tuple
        assert [sorted(map(repr, part)) for part in megatron.diff(x, y)] == [sorted(map(repr, p)) for p in theirs]


@given(x=TOP)
def test_maps_and_iterators_behave_as_in_megatron_core(dicts: Any, x: Any) -> None:
    for name in ("dict_list_map_inplace", "dict_list_map_outplace"):
        assert outcome(getattr(megatron, name), repr, x) == outcome(getattr(dicts, name), repr, x)
    assert list(megatron.nested_items_iter(x)) == list(dicts.nested_items_iter(x))
    assert list(megatron.nested_values(x)) == list(dicts.nested_values(x))


offsets = st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 2), st.integers(0, 3)), max_size=3)


@given(shape=st.lists(st.integers(0, 3), max_size=3), offsets=offsets, prepend=st.integers(0, 2))
def test_from_rank_offsets_behaves_as_in_megatron_core(
    shape: list[int], offsets: list[tuple[int, int, int]], prepend: int
) -> None:
    mapping = core(".mapping")

    def made(module: Any) -> Any:
        try:
            part = module.ShardedTensor.from_rank_offsets("k", torch.ones(shape), *offsets, prepend_axis_num=prepend)
            return (
                part.global_shape, part.global_offset, part.axis_fragmentations, part.global_slice(),
                part.max_allowed_chunks(), part.has_regular_grid,
            )  # fmt: skip
        except (megatron.CheckpointingException, mapping.CheckpointingException, IndexError):
            return None

    assert made(megatron) == made(mapping)


@given(data=st.data())
def test_narrow_selects_the_correct_elements_of_a_tensor(data: st.DataObject) -> None:
    extent, parts, layers = (data.draw(st.integers(1, 3)) for _ in range(3))
    rank, start, dim = (data.draw(st.integers(0, upto)) for upto in (parts - 1, extent - 1, 1))
    length = data.draw(st.integers(0, extent - start))
    offsets = ((0, 0, layers), (1 + dim, rank, parts))
    values = torch.arange(float(extent * extent)).view(extent, extent)

    def fields(module: Any) -> Any:
        part = module.ShardedTensor.from_rank_offsets("k", values, *offsets, prepend_axis_num=1)
        (one,) = part.narrow(dim, start, length)
        rest = (tuple(one.local_shape), one.global_shape, one.global_offset, one.axis_fragmentations)
        return one.data.tolist(), one.prepend_axis_num, *rest

    assert fields(megatron) == fields(core(".mapping"))


@given(key=st.text("ab.", min_size=1, max_size=3), shape=st.lists(st.integers(0, 12), max_size=3))
def test_unique_keys_are_the_same_as_in_megatron_core(key: str, shape: list[int]) -> None:
    arguments = (key, None, tuple(shape), tuple(shape))
    one, other = megatron.ShardedObject(*arguments), core(".mapping").ShardedObject(*arguments)
    assert one.unique_key == other.unique_key
    assert megatron.ShardedObject.empty_from_unique_key(one.unique_key) == one


@pytest.mark.parametrize("name", ["add_prefix_for_sharding", "replace_prefix_for_sharding", "apply_prefix_mapping"])
def test_prefixes_apply_to_objects_of_megatron_core(name: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "add_prefix_for_sharding": ("p.",),
        "replace_prefix_for_sharding": ("a.", "b."),
        "apply_prefix_mapping": ({"a.": "c.", "a.b": "never"},),
    }
    mapping = core(".mapping")
    states = [{"x": [mapping.ShardedObject("a.b", 1, (1,), (0,))]} for _ in range(2)]
    getattr(megatron, name)(states[0], *arguments[name])
    getattr(core(".utils"), name)(states[1], *arguments[name])
    assert states[0] == states[1]
    assert states[0]["x"][0].key != "a.b"
