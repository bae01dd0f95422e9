"""Parts of a sharded state dict by kind, and prefixes of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.frontends.megatron import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    nested_values,
    replace_prefix_for_sharding,
)
from tests.support.megatron_core import theirs


def state() -> dict[str, Any]:
    return {
        "tensor": ShardedTensor.from_rank_offsets("a.t", torch.ones(2)),
        "list": [ShardedObject("a.o", 1, (1,), (0,))],
        "factory": ShardedTensorFactory("a.f", torch.ones(2), lambda *_: {}, torch.cat),
        "local": LocalNonpersistentObject(1),
        "plain": torch.ones(2),
    }


@pytest.mark.parametrize("of_core", [False, True])
@pytest.mark.parametrize(
    ("extract", "wanted"),
    [
        (extract_sharded_tensors, "tensor"),
        (extract_sharded_tensors_and_factories, "tensor factory"),
        (extract_sharded_tensors_or_nonpersistent, "tensor factory local"),
        (extract_sharded_base, "tensor list factory"),
        (extract_nonpersistent, "local"),
    ],
)
def test_each_extract_function_selects_one_kind_of_part(extract: Any, wanted: str, of_core: bool) -> None:
    whole = theirs(state()) if of_core else state()
    found, rest = extract(whole)
    assert sorted(found) == sorted(wanted.split())
    assert sorted(rest) == sorted(set(whole) - set(found))


def keys(x: Any) -> list[str]:
    return [value.key for value in nested_values(extract_sharded_base(x)[0])]


def test_a_prefix_is_added_to_every_key() -> None:
    x = state()
    assert add_prefix_for_sharding(x, "p-") is None  # type: ignore[func-returns-value] # that is what is tested
    assert keys(x) == ["p-a.t", "p-a.o", "p-a.f"]


def test_the_first_matching_prefix_is_replaced() -> None:
    x = state()
    apply_prefix_mapping(x, {"b.": "1", "a.t": "2", "a.": "3"})
    assert keys(x) == ["2", "3o", "3f"]
    apply_prefix_mapping(x, {"nothing": "4"})
    assert keys(x) == ["2", "3o", "3f"]


def test_replacing_a_prefix_that_a_key_lacks_is_rejected() -> None:
    x = state()
    replace_prefix_for_sharding(x, "a.", "b.")
    assert keys(x) == ["b.t", "b.o", "b.f"]
    with pytest.raises(ValueError, match=r"'b.t' does not begin with 'c'"):
        replace_prefix_for_sharding(x, "c", "d")
