"""Metadata comes back as it was, or is refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.format.draft import encode
from casckpt.format.manifest import decode
from casckpt.format.sections.metadata import encode_metadata
from tests.support.ids import named
from tests.support.repositories import draft

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_metadata_decodes_as_encoded(metadata: dict[str, Any]) -> None:
    raw, short = encode_metadata(metadata)
    made = encode(draft([], metadata=raw))
    assert decode(made.data, made.id).metadata == metadata
    assert short is None or short == metadata


def test_metadata_beyond_json_is_only_in_the_manifest() -> None:
    for value in (math.nan, math.inf, "x" * (64 << 10)):
        raw, short = encode_metadata({"v": value})
        assert short is None
        assert repr(msgspec.msgpack.decode(raw)["v"]) == repr(value)
    assert encode_metadata({"t": (1, 2)})[1] == {"t": [1, 2]}


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"a": b"x"}, "metadata['a'] is a bytes"),
        ({"a": [1, {"b": object()}]}, "metadata['a'][1]['b'] is a object"),
        ({"a": 2**63}, "metadata['a'] is a int"),
        ({1: 2}, "metadata has the key 1;"),
        ({"a": {None: 2}}, "metadata['a'] has the key None;"),
        ([1], "not a list"),
        ("text", "not a str"),
        ({"a": "\ud800"}, "surrogate"),
    ],
    ids=named,
)
def test_metadata_that_json_cannot_hold_is_refused(metadata: Any, names: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_metadata(metadata)
    assert names in str(caught.value)


def test_metadata_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInput, match="levels deep"):
        encode_metadata({"a": loop})
