"""The tree keeps what flat keys cannot, merges over ranks, and is refused where it is hostile."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain, tree
from casckpt.format.plain import Extension
from casckpt.format.tree import Container, Leaf, Node, decode_tree, encode_tree, find, join, leaves, merge, rebuild
from tests.support.exact import same
from tests.support.ids import named as short

T, P = Leaf("tensor"), Leaf("object")


def box(kind: str = "dict", extra: bytes = b"", /, **children: Node) -> Container:
    return Container(kind, tuple(children.items()), extra)


def items(kind: str, *children: Node) -> Container:
    return Container(kind, tuple(enumerate(children)))


ELEMENTS = st.text(max_size=3) | st.integers(-(2**63), 2**63 - 1)
NODES: st.SearchStrategy[Node] = st.recursive(
    st.sampled_from([T, P]),
    lambda inner: (
        st.builds(
            lambda kind, children, extra: Container(kind, tuple(children.items()), extra),
            st.sampled_from(["dict", "OrderedDict", "defaultdict"]),
            st.dictionaries(ELEMENTS, inner, max_size=4),
            st.binary(max_size=4),
        )
        | st.builds(
            lambda kind, nodes: items(kind, *nodes), st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=4)
        )
    ),
    max_leaves=12,
)


@given(NODES)
def test_any_tree_comes_back(node: Node) -> None:
    data = encode_tree(node)
    assert decode_tree(data) == node
    assert encode_tree(decode_tree(data)) == data


@settings(max_examples=300)
@given(NODES.map(encode_tree), st.data())
def test_mutated_bytes_give_a_tree_or_refused(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data)))
    changed = data[:at] + draw.draw(st.binary(max_size=4)) + data[at + draw.draw(st.integers(0, 2)) :]
    try:
        node = decode_tree(changed)
    except Refused as error:
        assert "the tree of a checkpoint is not usable" in str(error)  # noqa: PT017 - nothing else may be raised
    else:
        assert decode_tree(encode_tree(node)) == node


@pytest.mark.parametrize(
    "wire",
    [
        2,
        -1,
        True,
        None,
        "x",
        [],
        ["dict"],
        ["dict", b"", "a"],
        ["set", b""],
        ["dict", "x"],
        [["dict"], b""],
        ["dict", b"", "a", 0, "a", 1],
        ["dict", b"", 1.5, 0],
        ["dict", b"", True, 0],
        ["dict", b"", [], 0],
        ["list", b"", "a", 0],
        ["list", b"", 1, 0, 0, 0],
        {"dict": 1},
    ],
    ids=short,
)
def test_hostile_trees_are_refused(wire: Any) -> None:
    with pytest.raises(Refused):
        decode_tree(msgspec.msgpack.encode(wire))


def chain(levels: int) -> Node:
    node: Node = T
    for _ in range(levels):
        node = box(a=node)
    return node


def test_depth_is_limited() -> None:
    assert list(leaves(decode_tree(encode_tree(chain(tree.MAX_DEPTH))))) == [(("a",) * tree.MAX_DEPTH, T)]
    with pytest.raises(InvalidInput, match="levels deep"):
        encode_tree(chain(tree.MAX_DEPTH + 1))
    wire: Any = 0
    for _ in range(tree.MAX_DEPTH + 1):
        wire = ["dict", b"", "a", wire]
    with pytest.raises(Refused):
        decode_tree(msgspec.msgpack.encode(wire))
    with pytest.raises(Refused):
        decode_tree(b"\x91" * 100_000)


def test_flat_keys_and_leaves() -> None:
    node = box(model=box(layers=items("list", T, P)), step=P)
    assert join(("model", "layers", 0)) == "model.layers.0"
    assert [(join(path), leaf.kind) for path, leaf in leaves(node)] == [
        ("model.layers.0", "tensor"),
        ("model.layers.1", "object"),
        ("step", "object"),
    ]


def test_find_by_flat_key() -> None:
    inner = Container("dict", (("b.c", T), ("d", items("list", P))))
    node = Container("dict", (("a", inner), ("a.b", box(x=P))))
    assert find(node, "a") is inner
    assert find(node, "a.b.c") == T
    assert find(node, "a.b.x") == P
    assert find(node, "a.d.0") == P
    assert find(node, "a.d.1") is None
    assert find(node, "a.d.0.x") is None


# merge


def test_merge_keeps_the_first_order_and_adds_what_is_new() -> None:
    one = box(z=T, a=box(x=T))
    two = box(b=P, a=box(y=T, x=T), z=T)
    assert merge([one, two, two]) == box(z=T, a=box(x=T, y=T), b=P)
    assert merge([one]) is one


def test_merge_of_lists_goes_by_index() -> None:
    one = Container("list", ((1, T),))
    two = Container("list", ((0, P), (2, T)))
    assert merge([box(a=one), box(a=two)]) == box(a=items("list", P, T, T))


def test_merge_fills_an_empty_container() -> None:
    assert merge([box(a=box()), box(a=box(x=T))]) == box(a=box(x=T))


@pytest.mark.parametrize(
    ("one", "two"),
    [(T, P), (T, box()), (box(), items("list")), (box(), box("OrderedDict"))],
)
def test_merge_refuses_two_kinds_and_names_the_key(one: Node, two: Node) -> None:
    with pytest.raises(InvalidInput, match=r"key 'm\.a' is a .* on one rank and a .* on another") as caught:
        merge([box(m=box(a=one)), box(m=box(a=two))])
    assert caught.value.key == "m.a"


def test_merge_refuses_two_paths_with_one_flat_key() -> None:
    with pytest.raises(InvalidInput, match=r"\['a'\]\['b'\] of one rank and \['a\.b'\] of another"):
        merge([box(a=box(b=T)), Container("dict", (("a.b", T),))])


def test_merge_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput):
        merge([])


def test_merge_unites_metadata() -> None:
    one = box("OrderedDict", plain.encode({"": {"version": 1}, "a": {"version": 2}}), x=T)
    two = box("OrderedDict", plain.encode({"a": {"version": 3}, "b": {"version": 4}}), x=T)
    merged = merge([one, box("OrderedDict", x=T), two])
    assert isinstance(merged, Container)
    assert plain.decode(merged.extra) == {"": {"version": 1}, "a": {"version": 2}, "b": {"version": 4}}


def test_merge_takes_the_first_extra_of_other_kinds() -> None:
    one, two = (box("defaultdict", plain.encode(defaultdict(kind))) for kind in (list, int))
    assert merge([one, two]) == one
    strange = [box("OrderedDict", plain.encode(number)) for number in (1, 2)]
    assert merge(strange) == strange[0]


# rebuild


def everything(key: str) -> bool:
    return True


def named(key: str, leaf: Leaf) -> str:
    return f"{leaf.kind}:{key}"


def test_rebuild_gives_the_nested_value() -> None:
    metadata = OrderedDict({"": {"version": 1}})
    node = box(
        o=box("OrderedDict", plain.encode(metadata), z=T, a=P),
        d=box("defaultdict", plain.encode(defaultdict(list)), x=P),
        unknown=box("defaultdict", x=P),
        t=items("tuple", T, items("list", P)),
        e=box(),
        keys=Container("dict", ((1, P), ("2", P))),
    )
    ordered = OrderedDict(z="tensor:o.z", a="object:o.a")
    vars(ordered)["_metadata"] = metadata
    made: defaultdict[str, Any] = defaultdict(list, x="object:d.x")
    wanted = {
        "o": ordered,
        "d": made,
        "unknown": {"x": "object:unknown.x"},
        "t": ("tensor:t.0", ["object:t.1.0"]),
        "e": {},
        "keys": {1: "object:keys.1", "2": "object:keys.2"},
    }
    assert same(rebuild(node, named, everything), wanted)


def test_rebuild_drops_what_is_not_kept() -> None:
    node = box(model=box(a=T, b=T), optim=box(state=box(), groups=items("list", T, T)), none=box())
    assert rebuild(node, named, lambda key: key.startswith("model.a")) == {"model": {"a": "tensor:model.a"}}
    assert rebuild(node, named, lambda key: key.startswith("optim.s")) == {"optim": {"state": {}}}
    assert rebuild(node, named, lambda key: False) == {}
    assert rebuild(box("OrderedDict", a=T), named, lambda key: False) == OrderedDict()


@pytest.mark.parametrize("kind", ["list", "tuple"])
def test_a_sequence_that_loses_items_comes_back_by_index(kind: str) -> None:
    node = box(a=items(kind, T, T, T))
    assert rebuild(node, named, lambda key: key != "a.1") == {"a": {0: "tensor:a.0", 2: "tensor:a.2"}}
    gap = box(a=Container(kind, ((1, T),)))
    assert rebuild(gap, named, everything) == {"a": {1: "tensor:a.1"}}


def test_rebuild_of_a_single_leaf() -> None:
    assert rebuild(T, named, everything) == "tensor:"


def test_rebuild_knows_extensions() -> None:
    extension = Extension("leaf", Leaf, lambda leaf: leaf.kind, Leaf)
    node = box("OrderedDict", plain.encode({"x": P}, extensions=[extension]), a=T)
    assert vars(rebuild(node, named, everything, [extension]))["_metadata"] == {"x": P}
    merged = merge([node, box("OrderedDict", plain.encode({"y": 1}), a=T)], [extension])
    assert vars(rebuild(merged, named, everything, [extension]))["_metadata"] == {"x": P, "y": 1}


def test_rebuild_refuses_a_hostile_extra() -> None:
    with pytest.raises(Refused):
        rebuild(box("OrderedDict", b"\xc1", a=T), named, everything)
