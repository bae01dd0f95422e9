"""Any nested state is flattened to leaves, and rebuilt exactly."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.format.tree import OBJECT, TENSOR, Leaf
from casckpt.tensors.objects import decode_object, encode_object
from casckpt.tensors.state import FlatState, decode_tree, encode_tree, flatten, inflate, replace_leaves
from casckpt.tensors.values import PerRank, Shard
from tests.support.exact import same

Pair = namedtuple("Pair", "a b")


def tensor() -> torch.Tensor:
    return torch.zeros(2)


def kinds(flat: FlatState) -> dict[str, str]:
    return {key: "tensor" if leaf.is_tensor else "object" for key, leaf in flat.leaves.items()}


def through(state: Any) -> Any:
    """Return the state after a save and a complete read."""
    flat = flatten(state)

    def leaf(key: str, node: Leaf) -> Any:
        value = flat.leaves[key].value
        assert (node == TENSOR) == flat.leaves[key].is_tensor
        return value if node == TENSOR else decode_object(key, *encode_object(key, value, False), False)

    return inflate(decode_tree(encode_tree(flat.tree)), leaf, lambda key: True)


# leaves


def test_mappings_are_flattened_and_other_values_are_leaves() -> None:
    state = {"model": {"w": tensor(), "b": torch.nn.Parameter(tensor())}, "step": 3, "none": None, 7: "seven"}
    flat = flatten(state)
    assert kinds(flat) == {"model.w": "tensor", "model.b": "tensor", "step": "object", "none": "object", "7": "object"}
    assert flat.leaves["model.w"].path == ("model", "w")
    assert flat.leaves["7"].path == (7,)
    assert flat.leaves["model.w"].value is state["model"]["w"]  # type: ignore[index]  # a nested state


def test_lists_and_tuples_are_flattened_only_if_they_contain_tensors() -> None:
    state = {"a": [1, {"x": 2}], "b": [1, {"x": tensor()}], "c": (None, (tensor(),)), "d": [], "e": ()}
    assert kinds(flatten(state)) == {
        "a": "object",
        "b.0": "object",
        "b.1.x": "tensor",
        "c.0": "object",
        "c.1.0": "tensor",
        "d": "object",
        "e": "object",
    }


def test_shards_and_lists_of_shards_are_treated_as_tensors() -> None:
    shard = Shard(torch.zeros(2), (4,), offset=(0,))
    chunks = [shard, Shard(torch.zeros(2), (4,), offset=(2,))]
    flat = flatten({"one": shard, "many": chunks, "mixed": [shard, 1]})
    assert kinds(flat) == {"one": "tensor", "many": "tensor", "mixed.0": "tensor", "mixed.1": "object"}
    assert flat.leaves["many"].value is chunks


def test_dtensors_are_treated_as_tensors() -> None:
    class Sub(torch.Tensor):
        pass

    assert kinds(flatten({"a": tensor().as_subclass(Sub)})) == {"a": "tensor"}


def test_dicts_with_keys_of_other_types_are_leaves_if_they_contain_no_tensors() -> None:
    state = {"a": {(1, 2): 3}, "b": {True: 1}, "c": {2**70: 1}}
    assert kinds(flatten(state)) == {"a": "object", "b": "object", "c": "object"}
    with pytest.raises(InvalidInput, match=r"state\['m'\]\['a'\]: the key \(1, 2\)") as caught:
        flatten({"m": {"a": {(1, 2): tensor()}}})
    assert caught.value.key == "m.a"


def test_the_state_itself_must_have_str_or_int_keys() -> None:
    with pytest.raises(InvalidInput, match=r"the key 1\.5"):
        flatten({1.5: 1})


def test_a_named_tuple_with_tensors_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"state\['a'\]\[0\]: a Pair cannot hold tensors"):
        flatten({"a": [Pair(1, tensor())]})
    assert kinds(flatten({"a": torch.Size([1])})) == {"a": "object"}


def test_a_per_rank_value_marks_everything_inside_it() -> None:
    flat = flatten({"rng": PerRank({"cpu": tensor(), "py": [1]}), "a": [PerRank(1), 2], "b": 3})
    assert {key: leaf.per_rank for key, leaf in flat.leaves.items()} == {
        "rng.cpu": True,
        "rng.py": True,
        "a.0": True,
        "a.1": False,
        "b": False,
    }
    assert flat.leaves["a.0"].value == 1
    assert flatten(PerRank({"x": 1})).leaves["x"].per_rank


# refusals


@pytest.mark.parametrize("state", [torch.zeros(1), [1], None, PerRank([1])])
def test_a_state_must_be_a_mapping(state: Any) -> None:
    with pytest.raises(InvalidInput, match="pass a mapping"):
        flatten(state)
    with pytest.raises(InvalidInput, match="pass a mapping"):
        replace_leaves(state, {})


def test_a_module_is_not_a_valid_state() -> None:
    with pytest.raises(InvalidInput, match=r'not a Linear; pass it by name, as \{"model": model\}'):
        flatten(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a.b": 1, "a": {"b": 2}}, r"state\['a\.b'\] and state\['a'\]\['b'\] have the same flat key 'a\.b'"),
        ({1: 1, "1": 2}, r"state\[1\] and state\['1'\]"),
        ({"a\0": 1}, "NUL"),
        ({"\ud800": {}}, "surrogate"),
        ({"a" * 4000: {"b" * 96: 1}}, "4097 characters"),
        ({"": 1}, "an empty string"),
    ],
    ids=["dot", "int", "nul", "surrogate", "long", "empty"],
)
def test_invalid_keys_are_rejected(state: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        flatten(state)


def test_unusual_keys_and_the_longest_keys_are_stored() -> None:
    state = {"a" * 4000: {"b" * 95: 1}, "m": {"": 1, " ": 2, "..": 3}, "ключ": 4, "": {"x": 5}}
    assert list(flatten(state).leaves) == [f"{'a' * 4000}.{'b' * 95}", "m.", "m. ", "m...", "ключ", ".x"]
    assert same(through(state), state)


def test_cycles_and_excessive_depth_are_rejected() -> None:
    cycle: dict[str, Any] = {}
    cycle["a"] = {"b": cycle}
    with pytest.raises(InvalidInput, match="contains itself"):
        flatten(cycle)
    items: list[Any] = [tensor()]
    items += [items, items]
    with pytest.raises(InvalidInput, match="contains itself"):
        flatten({"a": items})
    deep: Any = tensor()
    for _ in range(201):
        deep = {"a": deep}
    with pytest.raises(InvalidInput, match="levels deep"):
        flatten(deep)
    with pytest.raises(InvalidInput, match="levels deep"):
        replace_leaves(deep, {"x": 1})


def test_a_list_that_contains_itself_and_no_tensors_is_rejected_as_plain_data() -> None:
    items: list[Any] = []
    items += [items, items]
    leaf = flatten({"a": items}).leaves["a"]
    with pytest.raises(InvalidInput, match="contains itself"):
        encode_object("a", leaf.value, False)


def test_metadata_that_is_not_plain_data_is_rejected() -> None:
    state = OrderedDict(a=tensor())
    vars(state)["_metadata"] = {"x": print}
    with pytest.raises(InvalidInput, match=r"state\['model'\]\._metadata\['x'\]: a function"):
        encode_tree(flatten({"model": state}).tree)


# saves and reads


def test_states_of_a_module_and_an_optimizer_are_flattened() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optim.step()
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    found = through(state)
    assert list(found["model"]) == list(state["model"])
    assert type(found["model"]) is OrderedDict
    assert found["model"]._metadata == state["model"]._metadata  # type: ignore[attr-defined]  # torch hangs it on the dict
    assert list(found["optim"]["state"]) == list(state["optim"]["state"])
    assert same(found["optim"]["param_groups"], state["optim"]["param_groups"])
    assert found["optim"]["state"][0]["exp_avg"] is state["optim"]["state"][0]["exp_avg"]


def test_containers_are_rebuilt_exactly() -> None:
    one = torch.ones(1)
    state = {
        "int": {1: one, "x": {}},
        "empty": OrderedDict(),
        "tuple": (one, [one, ()], {"y": (1,)}),
        "counter": Counter("abb"),
        "default": defaultdict(list, {"a": [1]}),
        "tensors": defaultdict(dict, {0: {"exp_avg": one}}),
        "types": (torch.float16, torch.Size([1]), torch.device("cpu")),
        "namespace": types.SimpleNamespace(a=(1, 2)),
    }
    found = through(state)
    assert found["int"] == {1: one, "x": {}}
    assert type(found["empty"]) is OrderedDict
    assert found["tuple"] == (one, [one, ()], {"y": (1,)})
    assert same(found["counter"], state["counter"])
    assert same(found["default"], state["default"])
    assert found["tensors"].default_factory is dict
    assert found["tensors"][0]["exp_avg"] is one
    assert found["types"] == state["types"]
    assert found["namespace"] == state["namespace"]


def test_other_mappings_are_rebuilt_as_dicts() -> None:
    found = through({"a": UserDict({"x": 1}), "b": types.MappingProxyType({"y": 2}), "c": defaultdict(lambda: 0, z=3)})
    assert same(found, {"a": {"x": 1}, "b": {"y": 2}, "c": {"z": 3}})


PLAIN = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2) | st.tuples(st.booleans())
STATES = st.dictionaries(
    st.integers(0, 9) | st.text("abc", min_size=1, max_size=2),
    st.recursive(
        PLAIN | st.builds(tensor),
        lambda inner: (
            st.dictionaries(st.integers(10, 19) | st.text("abc", min_size=1, max_size=2), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def equal(one: Any, other: Any) -> bool:
    """Compare values exactly, and tensors by identity."""
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is dict and type(other) is dict:
        return list(map(repr, one)) == list(map(repr, other)) and all(equal(one[key], other[key]) for key in one)
    if type(one) in (list, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return same(one, other)


@given(STATES)
def test_any_state_is_rebuilt_from_its_leaves(state: dict[Any, Any]) -> None:
    assert equal(through(state), state)


def test_inflate_rebuilds_only_the_selected_keys() -> None:
    flat = flatten({"m": {"a": tensor(), "b": [tensor(), tensor()]}, "step": 1, "e": {}})
    found = inflate(flat.tree, lambda key, leaf: key, lambda key: key in {"m.a", "m.b.1"})
    assert found == {"m": {"a": "m.a", "b": {1: "m.b.1"}}}


def test_a_state_is_described_by_a_tree() -> None:
    flat = flatten({"a": (tensor(), 1)})
    assert same(flat.tree, {"a": (TENSOR, OBJECT)})


# into a template


def test_the_leaves_of_a_state_are_replaced_in_place() -> None:
    weight = tensor()
    inner = {"w": weight, "step": 0}
    items = [weight, {"n": 1}]
    pair = (weight, 5, [weight, 6])
    state: dict[Any, Any] = {"m": inner, "items": items, "pair": pair, 3: None, "same": [1]}
    replace_leaves(state, {"m.step": 7, "items.1.n": 8, "pair.1": 9, "pair.2.1": 10, "3": "three"})
    assert state["m"] is inner
    assert inner["step"] == 7
    assert state["items"] is items
    assert items[1] == {"n": 8}
    assert state["pair"][1:] == (9, [weight, 10])
    assert state["pair"][2] is pair[2]
    assert state[3] == "three"
    assert state["same"] == [1]
    assert list(state) == ["m", "items", "pair", 3, "same"]


def test_none_and_whole_containers_can_be_replaced() -> None:
    filled = torch.ones(3)
    state: dict[str, Any] = {"a": None, "list": [tensor()], "o": OrderedDict(x=1)}
    replace_leaves(state, {"a": filled, "list": [filled, filled]})
    assert state["a"] is filled
    assert state["list"] == [filled, filled]


def test_a_per_rank_value_remains_marked() -> None:
    inner = {"a": 1}
    state: dict[str, Any] = {"x": PerRank(1), "y": PerRank(inner)}
    replace_leaves(state, {"x": 2, "y.a": 3})
    assert state["x"] == PerRank(2)
    assert state["y"].value is inner
    assert inner == {"a": 3}


def test_a_state_does_not_change_if_a_key_is_unknown_or_a_mapping_is_read_only() -> None:
    fixed: Mapping[str, int] = types.MappingProxyType({"y": 1})
    state: dict[str, Any] = {"a": 1, "b": fixed}
    with pytest.raises(InvalidInput, match="cannot set key 'z'"):
        replace_leaves(state, {"a": 2, "z": 3})
    with pytest.raises(InvalidInput, match=r"state\['b'\]: a mappingproxy cannot be modified"):
        replace_leaves(state, {"a": 2, "b.y": 3})
    assert state == {"a": 1, "b": fixed}
