"""Plain data is decoded exactly, or refused with a clear error."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import inspect
import os
import random
import subprocess
import sys
import types
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.plain import Tagged, extension
from tests.support.exact import same
from tests.support.plain_examples import EXAMPLES, nested, with_metadata


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    __slots__ = ()


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Options:
    depth: int = 3


def function() -> None:
    """Stands for any function."""


def back(value: Any, **options: Any) -> Any:
    return plain.decode(plain.encode(value, **options))


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_value_decodes_exactly(value: Any) -> None:
    assert same(back(value), value)
    assert same(back([{"k": (value,)}]), [{"k": (value,)}])


def test_dict_order_is_preserved() -> None:
    assert list(back({"z": 1, "a": 2, 3: 3})) == ["z", "a", 3]


HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers()
    | st.dates()
    | st.timedeltas(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


LEAVES = (
    HASHABLE
    | st.binary(max_size=60).map(bytearray)
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.times()
    | hnp.arrays(
        hnp.scalar_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes(), hnp.array_shapes(max_side=3)
    )
    | st.builds(slice, st.none() | st.integers(), st.integers(), st.none())
)


VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4).map(collections.OrderedDict)
        | st.lists(inner, max_size=4).map(lambda items: collections.deque(items, maxlen=4))
        | st.dictionaries(st.text(), inner, max_size=3).map(lambda names: types.SimpleNamespace(**names))
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=2 * settings().max_examples)
@given(VALUES)
def test_any_plain_value_decodes_exactly_and_reencodes_identically(value: Any) -> None:
    data = plain.encode(value)
    found = plain.decode(data)
    assert same(found, value)
    assert plain.encode(found) == data


def test_encoded_bytes_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from casckpt.format import plain; import sys; "
        "sys.stdout.write(plain.encode([{'a','b','c','d','e'}, frozenset(map(str, range(50)))]).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs != {b""}


def test_plain_data_does_not_import_torch() -> None:
    code = "import sys, casckpt.format.plain, casckpt.format.tree; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# long buffers


class Parts:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def spill(self, view: memoryview) -> int:
        assert (view.format, view.ndim) == ("B", 1)
        self.parts.append(bytes(view))
        return len(self.parts) - 1

    def load(self, number: int) -> memoryview:
        return memoryview(self.parts[number])


@pytest.mark.parametrize(
    "value",
    [b"x" * 100, bytearray(b"y" * 100), np.arange(100.0), np.arange(200.0)[::2], np.array(["ab"] * 50), 7**300],
    ids=lambda value: type(value).__name__,
)
def test_long_buffers_are_stored_as_separate_parts(value: Any) -> None:
    parts = Parts()
    data = plain.encode({"a": value, "b": b"short"}, spill=parts.spill, spill_from=100)
    assert len(parts.parts) == 1
    assert len(data) < 100
    assert same(plain.decode(data, load=parts.load), {"a": value, "b": b"short"})


def test_only_buffers_at_or_above_the_size_limit_become_parts() -> None:
    parts = Parts()
    plain.encode([b"x" * 4095, b"x" * 4096], spill=parts.spill)
    assert [len(part) for part in parts.parts] == [4096]


def test_buffers_inside_a_set_do_not_become_parts() -> None:
    parts = Parts()
    value = {b"x" * 200, (b"y" * 200,)}
    data = plain.encode([value, b"z" * 200], spill=parts.spill, spill_from=100)
    assert parts.parts == [b"z" * 200]
    assert same(plain.decode(data, load=parts.load), [value, b"z" * 200])


def test_a_part_of_the_wrong_length_is_rejected() -> None:
    data = plain.encode(b"x" * 200, spill=lambda _: 0, spill_from=100)
    with pytest.raises(Refused, match="part 0 has 3 bytes instead of 200"):
        plain.decode(data, load=lambda _: b"abc")


def test_a_part_that_is_named_twice_or_cannot_be_loaded_is_rejected() -> None:
    twice = plain.encode([b"x" * 200, b"x" * 200], spill=lambda _: 7, spill_from=100)
    with pytest.raises(Refused, match="twice"):
        plain.decode(twice, load=lambda _: b"x" * 200)
    with pytest.raises(Refused, match="part 7"):
        plain.decode(twice)


# refused values


REFUSED = [
    (function, "a function"),
    (len, "a function"),
    ([].append, "a function"),
    (Options, "a class"),
    (os, "a module"),
    (object(), "builtins.object"),
    (Colour.RED, "an enum member"),
    (Level.LOW, "an enum member"),
    (Name("x"), "Name"),
    (Point(1, 2), "a named tuple"),
    (Options(), "a dataclass"),
    (memoryview(b"x"), "memoryview"),
    (collections.defaultdict(lambda: 0), "factory"),
    (collections.ChainMap(), "ChainMap"),
    (random.Random(1), "Random"),
    (np.array([None]), "dtype object"),
    (np.zeros(2, [("a", "O")]), "dtype"),
    (np.zeros(2, [(("title", "a"), "<i4")]), "dtype"),
    (np.zeros(2, np.dtype("<i4", metadata={"a": 1})), "dtype"),
    (np.zeros(2, [("a", "<i4")]).view(np.recarray), "recarray"),
    (np.full(2, 0x110000, np.uint32).view("<U1"), "outside Unicode"),
    (np.ma.masked_array([1], [True]), "Masked"),
    (np.float64, "a class"),
    (dt.datetime(2020, 1, 1, tzinfo=type("Mine", (dt.tzinfo,), {})()), "tzinfo"),
]


@pytest.mark.parametrize(("value", "what"), REFUSED, ids=lambda item: type(item).__name__)
def test_a_value_that_is_not_plain_is_rejected(value: Any, what: str) -> None:
    with pytest.raises(InvalidInput, match=what) as caught:
        plain.encode(value, where="train.state")
    assert str(caught.value).startswith("train.state: ")
    assert str(caught.value).endswith("or pass allow_pickle=True")
    assert caught.value.key == "train.state"


def with_function_in_metadata() -> collections.OrderedDict[str, Any]:
    value = with_metadata()
    vars(value)["_metadata"] = {"f": function}
    return value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"param_groups": [{"lr": 1, "fn": function}]}, "optim['param_groups'][0]['fn']: "),
        ([1, (2, [function])], "optim[1][1][0]: "),
        (types.SimpleNamespace(a=1, b=[function]), "optim.b[0]: "),
        (argparse.Namespace(x=function), "optim.x: "),
        (collections.deque([1, function], maxlen=5), "optim[1]: "),
        (collections.OrderedDict(a=1, b=function), "optim['b']: "),
        (collections.defaultdict(list, b=[function]), "optim['b'][0]: "),
        (with_function_in_metadata(), "optim._metadata['f']: "),
        ({Colour.RED: 1}, "optim (its key <Colour>): "),
        ({(1, Colour.RED): 1}, "optim (its key <tuple>)[1]: "),
        ({"k" * 200: function}, "optim['" + "k" * 76 + "...]: "),
    ],
)
def test_the_error_for_an_unsupported_value_names_its_position(value: Any, place: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        plain.encode(value, where="optim")
    assert str(caught.value).startswith(place)


def test_a_value_that_contains_itself_is_rejected() -> None:
    value: dict[str, Any] = {"a": []}
    value["a"].append(value)
    with pytest.raises(InvalidInput, match=r"value\['a'\]\[0\]: it contains itself"):
        plain.encode(value)


def test_an_object_that_occurs_twice_is_not_mistaken_for_a_cycle() -> None:
    shared = [1]
    assert back([shared, shared, {"a": shared}]) == [[1], [1], {"a": [1]}]


def test_data_that_is_nested_too_deeply_is_rejected() -> None:
    assert back(nested(plain.MAX_DEPTH)) == nested(plain.MAX_DEPTH)
    for levels in (plain.MAX_DEPTH + 1, 100_000):
        with pytest.raises(InvalidInput, match="levels deep"):
            plain.encode(nested(levels))


def test_too_little_stack_space_raises_a_clear_error() -> None:
    def deep(levels: int) -> Any:
        return deep(levels - 1) if levels else plain.encode(nested(plain.MAX_DEPTH))

    room = sys.getrecursionlimit() - len(inspect.stack())
    with pytest.raises(InvalidInput, match="too deep"):
        deep(room - plain.MAX_DEPTH // 2)


# extensions


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def money(payload: Any) -> Money:
    if type(payload) is not int:
        raise TypeError("no money")
    return Money(payload)


MONEY = extension("money", Money, lambda value: value.cents, money)


def test_an_extension_adds_support_for_a_type() -> None:
    data = plain.encode({"price": Money(3)}, extensions=[MONEY])
    assert plain.decode(data, extensions=[MONEY])["price"].cents == 3


def test_an_unknown_tag_is_shown_or_rejected() -> None:
    data = plain.encode({"price": Money(3)}, extensions=[MONEY])
    assert plain.decode(data) == {"price": Tagged("money", 3)}
    with pytest.raises(Refused, match="does not know plain data of kind 'money'"):
        plain.decode(data, strict=True)


def test_an_extension_rejects_a_hostile_payload() -> None:
    with pytest.raises(Refused, match="no money"):
        plain.decode(msgspec.msgpack.encode(["money", "x"]), extensions=[MONEY])
    with pytest.raises(Refused):
        plain.decode(msgspec.msgpack.encode(["money"]), extensions=[MONEY])


def test_a_tagged_value_cannot_be_stored_again() -> None:
    with pytest.raises(InvalidInput, match="Tagged"):
        plain.encode(Tagged("list", 1))
