"""Untrusted bytes decode to a value or raise Refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format import plain
from tests.support.plain_examples import EXAMPLES, nested


def fields(names: list[Any], formats: list[Any], offsets: list[Any], size: int = 8) -> list[Any]:
    """Return a dtype with several fields, as stored."""
    columns = ("names", ["list", *names], "formats", ["list", *formats], "offsets", ["list", *offsets])
    return ["dict", *columns, "itemsize", size, "aligned", False]


def deep(levels: int) -> Any:
    """Return a dtype of nested arrays, as stored."""
    return ["tuple", deep(levels - 1), ["tuple", 1]] if levels else "<i4"


HOSTILE: list[Any] = [
    [],
    {},
    {"a": 1},
    [1, 2],
    [None],
    ["dict", 1],
    ["dict", 1, 2, True, 3],
    ["OrderedDict"],
    ["OrderedDict", 1, 2],
    ["dict", ["list"], 1],
    ["set", ["list"]],
    ["set", 1, 1],
    ["bytearray", 10**12],
    ["BytesIO", b"x"],
    ["BytesIO", b"x", -1],
    ["BytesIO", "x", 0],
    ["complex", "1", "2"],
    ["range", 0, 1, 0],
    ["deque", 1, 2, 3],
    ["deque", -1],
    ["deque", 10**18 * 10],
    ["defaultdict", "eval"],
    ["defaultdict"],
    ["SimpleNamespace", 1, 2],
    ["slice", 1],
    ["int", "x"],
    ["int"],
    ["str", b"\xff"],
    ["path", "os.system", "x"],
    ["path", "PosixPath"],
    ["date", 0, 0, 0],
    ["datetime", b"\x07\xe4\x01\x01\x00\x00\x00\x00\x00\x00"],
    ["timedelta", 10**15, 0, 0],
    ["timezone", ["timedelta", 5, 0, 0], None],
    ["zoneinfo", "../../etc/passwd"],
    ["zoneinfo", "/etc/passwd"],
    ["zoneinfo", "America"],
    ["zoneinfo", "No/Where"],
    ["numpy.ndarray", "|O", ["tuple", 1], b"12345678"],
    ["numpy.ndarray", "O", ["tuple", 1], b"12345678"],
    ["numpy.ndarray", "<f8", ["tuple", 2**40], b""],
    ["numpy.ndarray", "<f8", ["tuple", 2**40, 0, 2**40], b""],
    ["numpy.ndarray", "<f8", ["tuple", -1], b""],
    ["numpy.ndarray", "<f8", ["tuple", *[1] * 65], b"12345678"],
    ["numpy.ndarray", "|S0", ["tuple", 2**40], b""],
    ["numpy.ndarray", "|V0", ["tuple", 2**40], b""],
    ["numpy.ndarray", "|S9999999999", ["tuple", 0], b""],
    ["numpy.ndarray", "<M8[0s]", ["tuple", 1], b"12345678"],
    ["numpy.ndarray", "<M8[999999999as]", ["tuple", 0, 2**62], b""],
    ["numpy.ndarray", fields(["a"], ["<i4"], [6]), ["tuple", 1], b"12345678"],
    ["numpy.ndarray", fields(["a"], ["<i4"], [-4]), ["tuple", 1], b"12345678"],
    ["numpy.ndarray", fields(["a"], ["<i4"], [None]), ["tuple", 1], b"12345678"],
    ["numpy.ndarray", fields([1], ["<i4"], [0]), ["tuple", 1], b"12345678"],
    ["numpy.ndarray", fields(["a"], [], [0]), ["tuple", 1], b"12345678"],
    ["numpy.ndarray", fields(["a"], ["O"], [0]), ["tuple", 1], b"12345678"],
    ["numpy.ndarray", fields(["a"], ["<i4"], [0])[:-2], ["tuple", 1], b"12345678"],
    ["numpy.ndarray", [*fields(["a"], ["<i4"], [0]), "titles", ["list", "t"]], ["tuple", 1], b"12345678"],
    ["numpy.ndarray", fields([], [], [], 2**40), ["tuple", 1], b"12345678"],
    ["numpy.ndarray", ["tuple", "<f8", ["tuple", 2**40]], ["tuple", 1], b""],
    ["numpy.ndarray", ["tuple", "<i4", ["tuple", 2]], ["tuple", 1], b"12345678"],
    ["numpy.ndarray", ["tuple", "<i4", 2], ["tuple", 1], b"12345678"],
    ["numpy.ndarray", deep(40), ["tuple", 0], b""],
    ["numpy.ndarray", "<f8,O", ["tuple", 0], b""],
    ["numpy.ndarray", "<f16", ["tuple", 0], b""],
    ["numpy.ndarray", "<f16/1", ["tuple", 0], b""],
    ["numpy.ndarray", "<f16; x/63", ["tuple", 0], b""],
    ["numpy.ndarray", "<U1", ["tuple", 1], b"\x00\x00\x11\x00"],
    ["numpy.scalar", fields(["a"], [">U1"], [0], 4), b"\x00\x11\x00\x00"],
    ["numpy.scalar", "<f8", b""],
    ["numpy.Generator", ["dict", "bit_generator", "eval"], None],
    ["numpy.Generator", ["dict"], None],
    ["part"],
    ["part", -1, 3],
    ["part", True, 3],
    ["part", "0", 3],
    [["list"]],
    ["unknown", ["dict", ["unknown", ["list"]], 1]],
]


@pytest.mark.parametrize("wire", HOSTILE, ids=lambda wire: str(wire)[:50])
def test_hostile_trees_are_rejected(wire: Any) -> None:
    with pytest.raises(Refused):
        plain.decode(msgspec.msgpack.encode(wire), load=lambda _: b"")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\xc0",
        (b"\x92\xa4list" * 100_000) + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xa1\xff",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xd4\x05\x01",
        b"\xc0\xc0",
        msgspec.msgpack.encode(nested(3)),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_hostile_bytes_in_place_of_plain_data_are_rejected(data: bytes) -> None:
    with pytest.raises(Refused):
        plain.decode(data)


def wire_nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = ["list", value]
    return value


def test_stored_data_that_is_nested_too_deeply_is_rejected() -> None:
    assert plain.decode(msgspec.msgpack.encode(wire_nested(plain.MAX_DEPTH))) == nested(plain.MAX_DEPTH)
    with pytest.raises(Refused, match="levels deep"):
        plain.decode(msgspec.msgpack.encode(wire_nested(plain.MAX_DEPTH + 1)))


def decoded_or_refused(data: bytes) -> None:
    try:
        plain.decode(data, load=lambda number: bytes(number % 9))
    except Refused as error:
        assert str(error)  # noqa: PT017 - the point is that nothing else is raised


@settings(max_examples=4 * settings().max_examples)
@given(st.binary(max_size=80))
def test_random_bytes_in_place_of_plain_data_are_decoded_or_rejected(data: bytes) -> None:
    decoded_or_refused(data)


ENCODED = [plain.encode(value) for value in EXAMPLES] + [
    plain.encode(kind(3)) for kind in (np.random.default_rng, np.random.RandomState, np.random.Philox)
]


@settings(max_examples=6 * settings().max_examples)
@given(st.sampled_from(ENCODED), st.data())
def test_mutated_bytes_decode_to_a_value_or_are_rejected(data: bytes, draw: st.DataObject) -> None:
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(changed)))
        removed = draw.draw(st.integers(0, 2))
        changed[at : at + removed] = draw.draw(st.binary(max_size=3))
    decoded_or_refused(bytes(changed))


TAGS = [*sorted(plain._BY_TAG), "part", "unknown"]


WORDS = ["<f8", "|S0", "|V3", "<M8[s]", ">U2", "<f16/63", "bit_generator", "PCG64", "PosixPath", "list"]


WIRE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-2, 20)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(WORDS)
    | st.binary(max_size=16),
    lambda inner: st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(TAGS), st.lists(inner, max_size=4)),
    max_leaves=15,
)


@settings(max_examples=4 * settings().max_examples)
@given(WIRE)
def test_random_well_formed_data_is_decoded_or_rejected(wire: Any) -> None:
    decoded_or_refused(msgspec.msgpack.encode(wire))
