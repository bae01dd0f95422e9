"""The tree describes structure that flat keys lose. Trees of several ranks are merged, and hostile trees are
refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.plain import extension
from casckpt.format.tree import OBJECT as P
from casckpt.format.tree import TENSOR as T
from casckpt.format.tree import (
    Leaf,
    Node,
    Wrapper,
    decode_tree,
    encode_tree,
    find,
    join,
    kind_of,
    leaves,
    merge,
    outer_keys,
    rebuild,
    units,
    wrappers_in,
)
from tests.support.exact import same
from tests.support.ids import named as short


def ordered(metadata: Any = None, /, **children: Node) -> OrderedDict[Any, Node]:
    made = OrderedDict(children)
    if metadata is not None:
        vars(made)["_metadata"] = metadata
    return made


def default(factory: Any, /, **children: Any) -> defaultdict[Any, Any]:
    return defaultdict(factory, children)


KNOWN = [extension("known", bytearray, bytes, bytearray)]
ELEMENTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.integers(-(2**63), 2**63 - 1)
PLAIN = st.none() | st.integers(0, 3) | st.dictionaries(st.text("ab"), st.integers(0, 3), max_size=2)
NODES: st.SearchStrategy[Node] = st.recursive(
    st.sampled_from([T, P]),
    lambda inner: (
        st.builds(
            lambda make, children: make(children),
            st.sampled_from([dict, OrderedDict, partial(defaultdict, list), partial(defaultdict, None)]),
            st.dictionaries(ELEMENTS, inner, max_size=4),
        )
        | st.builds(lambda metadata, key, node: ordered(metadata, **{key: node}), PLAIN, st.text("ab"), inner)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=12,
)


@given(NODES)
def test_any_tree_decodes_as_encoded(node: Node) -> None:
    data = encode_tree(node)
    assert same(decode_tree(data), node)
    assert encode_tree(decode_tree(data)) == data


@settings(max_examples=4 * settings().max_examples)
@given(NODES.map(encode_tree), st.data())
def test_mutated_bytes_are_decoded_or_rejected(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data)))
    changed = data[:at] + draw.draw(st.binary(max_size=4)) + data[at + draw.draw(st.integers(0, 2)) :]
    try:
        node = decode_tree(changed, KNOWN)
    except Refused as error:
        assert "the tree of a checkpoint is invalid" in str(error)  # noqa: PT017 - nothing else may be raised
    else:
        assert same(decode_tree(encode_tree(node, KNOWN)), node)


@pytest.mark.parametrize(
    "wire",
    [
        2,
        -1,
        True,
        None,
        "x",
        [],
        0.0,
        ["dict", "a"],
        ["set"],
        ["later"],
        ["dict", "x", ["frozenset"]],
        [["dict"]],
        ["dict", "a", 0, "a", 1],
        ["dict", "a", True],
        ["dict", "a", ["int", b"\1"], "b", 2],
        ["dict", 1.5, 0],
        ["dict", True, 0],
        ["dict", None, 0],
        ["dict", ["tuple"], 0],
        ["dict", ["int", b"\1" * 2000], 0],
        ["dict", ["str", b"\xed\xa0\x80"], 0],
        ["list", 0, 2],
        ["list", ["part", 0, 1]],
        ["OrderedDict"],
        ["defaultdict", "eval"],
        {"dict": 1},
    ],
    ids=short,
)
def test_hostile_trees_are_rejected(wire: Any) -> None:
    with pytest.raises(Refused):
        decode_tree(msgspec.msgpack.encode(wire))


def chain(levels: int) -> Node:
    node: Node = T
    for _ in range(levels):
        node = {"a": node}
    return node


def test_data_that_is_nested_too_deeply_is_rejected() -> None:
    assert list(leaves(decode_tree(encode_tree(chain(plain.MAX_DEPTH))))) == [(("a",) * plain.MAX_DEPTH, T)]
    with pytest.raises(InvalidInput, match="levels deep"):
        encode_tree(chain(plain.MAX_DEPTH + 1))
    wire: Any = 0
    for _ in range(plain.MAX_DEPTH + 1):
        wire = ["dict", "a", wire]
    with pytest.raises(Refused):
        decode_tree(msgspec.msgpack.encode(wire))
    with pytest.raises(Refused):
        decode_tree(b"\x91" * 100_000)


def test_a_tree_yields_flat_keys_and_leaves() -> None:
    node: Node = {"model": {"layers": [T, P]}, "step": P}
    assert join(("model", "layers", 0)) == "model.layers.0"
    assert [(join(path), leaf) for path, leaf in leaves(node)] == [
        ("model.layers.0", T),
        ("model.layers.1", P),
        ("step", P),
    ]


def test_a_leaf_is_found_by_its_flat_key() -> None:
    inner: Node = {"b.c": T, "d": [P]}
    node: Node = {"a": inner, "a.b": {"x": P}}
    assert find(node, "a") is inner
    assert find(node, "a.b.c") == T
    assert find(node, "a.b.x") == P
    assert find(node, "a.d.0") == P
    assert find(node, "a.d.1") is None
    assert find(node, "a.d.0.x") is None


# merge


def test_merge_keeps_the_order_of_the_first_tree_and_appends_new_keys() -> None:
    one: Node = {"z": T, "a": {"x": T}}
    two: Node = {"b": P, "a": {"y": T, "x": T}, "z": T}
    assert same(merge([one, two, two]), {"z": T, "a": {"x": T, "y": T}, "b": P})
    assert merge([one]) is one


def test_merging_trees_combines_lists_by_index() -> None:
    assert merge([{"a": [P, {"x": T}]}, {"a": [P, {"y": T}, T]}]) == {"a": [P, {"x": T, "y": T}, T]}
    assert merge([(T,), (T, P)]) == (T, P)


def test_merging_trees_fills_an_empty_container() -> None:
    assert merge([{"a": {}}, {"a": {"x": T}}]) == {"a": {"x": T}}


@pytest.mark.parametrize(
    ("one", "two"),
    [(T, P), (T, {}), ({}, []), ({}, OrderedDict())],
)
def test_merge_rejects_containers_of_different_kinds_and_names_the_key(one: Node, two: Node) -> None:
    with pytest.raises(
        InvalidInput, match=r"key 'm\.a' is of kind .* on one rank, but of kind .* on a different rank"
    ) as caught:
        merge([{"m": {"a": one}}, {"m": {"a": two}}])
    assert caught.value.key == "m.a"


def test_merge_rejects_two_paths_with_the_same_flat_key() -> None:
    with pytest.raises(InvalidInput, match=r"\['a'\]\['b'\] of one rank and \['a\.b'\] of a different rank"):
        merge([{"a": {"b": T}}, {"a.b": T}])


def test_an_empty_list_of_trees_cannot_be_merged() -> None:
    with pytest.raises(InvalidInput):
        merge([])


def test_merging_trees_combines_their_metadata() -> None:
    one = ordered(OrderedDict({"": {"version": 1}, "a": {"version": 2}}), x=T)
    two = ordered({"a": {"version": 3}, "b": {"version": 4}}, x=T)
    merged = merge([one, ordered(x=T), two])
    united = OrderedDict({"": {"version": 1}, "a": {"version": 2}, "b": {"version": 4}})
    assert same(merged, ordered(united, x=T))
    assert len(vars(one)["_metadata"]) == 2


def test_merge_keeps_other_attributes_of_the_first_tree() -> None:
    one, two, both = default(list, x=T), default(int, y=T), default(list, x=T, y=T)
    assert same(merge([one, two]), both)
    strange = [ordered(number, x=T) for number in (1, 2)]
    assert same(merge(strange), strange[0])


# rebuild


def everything(key: str) -> bool:
    return True


def named(key: str, leaf: Leaf) -> str:
    return f"{'object' if leaf else 'tensor'}:{key}"


def test_rebuilding_a_tree_returns_the_nested_value() -> None:
    metadata = OrderedDict({"": {"version": 1}})
    node: Node = {
        "o": ordered(metadata, z=T, a=P),
        "d": default(list, x=P),
        "t": (T, [P]),
        "e": {},
        "keys": {1: P, "2": P},
    }
    wanted = {
        "o": ordered(metadata, z="tensor:o.z", a="object:o.a"),  # type: ignore[arg-type]  # values in place of nodes
        "d": default(list, x="object:d.x"),
        "t": ("tensor:t.0", ["object:t.1.0"]),
        "e": {},
        "keys": {1: "object:keys.1", "2": "object:keys.2"},
    }
    assert same(rebuild(node, named, everything), wanted)


def test_metadata_of_a_rebuilt_value_can_be_changed() -> None:
    """torch changes it when it loads with assign=True."""
    node = ordered({"": {"version": 1}}, x=T)
    vars(rebuild(node, named, everything))["_metadata"][""]["assign"] = True
    assert vars(rebuild(node, named, everything))["_metadata"] == {"": {"version": 1}}


def test_rebuild_omits_leaves_that_were_not_selected() -> None:
    node: Node = {"model": {"a": T, "b": T}, "optim": {"state": {}, "groups": [T, T]}, "none": {}}
    assert rebuild(node, named, lambda key: key.startswith("model.a")) == {"model": {"a": "tensor:model.a"}}
    assert rebuild(node, named, lambda key: key.startswith("optim.s")) == {"optim": {"state": {}}}
    assert rebuild(node, named, lambda key: False) == {}
    assert same(rebuild(ordered({"": 1}, a=T), named, lambda key: False), ordered({"": 1}))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_with_missing_items_is_rebuilt_by_index(kind: Any) -> None:
    node: Node = {"a": kind((T, T, T))}
    assert rebuild(node, named, lambda key: key != "a.1") == {"a": {0: "tensor:a.0", 2: "tensor:a.2"}}
    assert rebuild(node, named, lambda key: key != "a.2") == {"a": {0: "tensor:a.0", 1: "tensor:a.1"}}


def test_rebuilding_a_tree_of_one_leaf_returns_that_leaf() -> None:
    assert rebuild(T, named, everything) == "tensor:"


def test_metadata_can_contain_extension_types() -> None:
    class Strange:
        pass

    extensions = [extension("strange", Strange, lambda one: None, lambda payload: Strange())]
    data = encode_tree(ordered({"x": Strange()}, a=T), extensions)
    found = rebuild(decode_tree(data, extensions), named, everything)
    assert type(vars(found)["_metadata"]["x"]) is Strange
    assert vars(decode_tree(data))["_metadata"]["x"] == plain.Tagged("strange", None)
    with pytest.raises(InvalidInput, match=r"state\._metadata\['x'\]"):
        encode_tree(ordered({"x": Strange()}, a=T))


# wrappers

FORM = '{"dtype":"int8","kind":"a:B","shape":[8]}'
OTHER = '{"dtype":"int8","kind":"a:C","shape":[]}'
PARTS = '{"dtype":"int8","shape":[8]}'
INNER = Wrapper(FORM, {"codes": T, "scale": Wrapper(OTHER, {"x": T})})
HOLDING: Node = {"m": {"w": INNER, "b": T}, "n": P}


def test_a_wrapper_is_one_unit_with_inner_leaves() -> None:
    tree = HOLDING
    data = encode_tree(tree)
    assert decode_tree(data) == tree
    assert outer_keys(wrappers_in(data)) == {"m.w.codes": "m.w", "m.w.scale.x": "m.w"}
    assert [(join(path), kind_of(node)) for path, node in units(tree)] == [
        ("m.w", "wrapper"), ("m.b", "tensor"), ("n", "object"),
    ]  # fmt: skip
    assert find(tree, "m.w") == INNER
    made = rebuild(tree, lambda key, leaf: key, lambda key: True, lambda key, node, values: (key, node.form, values))
    inner = ("m.w.scale", OTHER, {"x": "m.w.scale.x"})
    assert made["m"]["w"] == ("m.w", FORM, {"codes": "m.w.codes", "scale": inner})
    assert wrappers_in(encode_tree({"wrapper": T})) == {}


def test_trees_with_parts_of_the_same_wrapper_are_merged_unless_their_forms_differ() -> None:
    parts = [Wrapper(PARTS, {str(first): T}) for first in (0, 4)]
    tree: Any = merge([{"w": part} for part in parts])
    assert tree == {"w": Wrapper(PARTS, {"0": T, "4": T})}
    with pytest.raises(InvalidInput, match="key 'w' is a wrapper with different forms on different ranks"):
        merge([{"w": parts[0]}, {"w": Wrapper(FORM, {"0": T})}])
    with pytest.raises(InvalidInput, match="is of kind wrapper on one rank, but of kind tensor"):
        merge([{"w": parts[0]}, {"w": T}])


@pytest.mark.parametrize(
    "payload",
    [
        [],
        ["tuple", FORM],
        ["tuple", FORM, ["list"]],
        ["tuple", FORM, ["dict", 1, 0]],
        ["tuple", FORM, ["dict", "a", 2]],
        ["tuple", FORM, ["dict", "a", 0], 0],
        ["tuple", FORM.replace(":", ": "), ["dict", "a", 0]],
        ["tuple", '{"dtype":"int8","kind":"a:B"}', ["dict", "a", 0]],
        ["tuple", '{"dtype":"int8","shape":[-1]}', ["dict", "a", 0]],
        ["tuple", '{"dtype":5,"shape":[1]}', ["dict", "a", 0]],
        ["tuple", '{"cut":{"a":1.5},"dtype":"int8","shape":[1]}', ["dict", "a", 0]],
        ["tuple", '{"cut":[],"dtype":"int8","shape":[1]}', ["dict", "a", 0]],
        ["tuple", 5, ["dict", "a", 0]],
        ["tuple", "[" * 60_000, ["dict", "a", 0]],
        FORM,
        0,
    ],
    ids=short,
)
def test_an_invalid_wrapper_is_refused(payload: Any) -> None:
    data = msgspec.msgpack.encode(["dict", "w", ["wrapper", payload]])
    with pytest.raises(Refused, match="the tree of a checkpoint is invalid"):
        decode_tree(data)


def test_metadata_with_a_value_of_a_later_version_is_refused_even_if_extensions_exist() -> None:
    """The value could not be encoded again, and a module would load it."""
    data = msgspec.msgpack.encode(["OrderedDict", ["dict", "x", ["later"]], "a", 0])
    assert list(leaves(decode_tree(data))) == [(("a",), T)]
    with pytest.raises(Refused, match="the tree of a checkpoint is invalid: this version"):
        decode_tree(data, KNOWN)
