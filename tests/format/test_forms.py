"""Each form has exactly one encoding and a limited size, and hostile forms are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Refused
from casckpt.format.forms import MAX_CHARACTERS, MAX_LEVELS, Form, decode_form, differences, encode_form

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
FORMS: st.SearchStrategy[Form] = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@given(FORMS)
def test_any_form_decodes_as_encoded_and_has_exactly_one_encoding(form: Form) -> None:
    text = encode_form(form)
    assert encode_form(decode_form(text)) == text == encode_form(dict(reversed(form.items())))
    assert not list(differences(form, decode_form(text)))


@given(FORMS.map(encode_form), st.data())
def test_a_changed_form_is_decoded_or_refused(text: str, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(text)))
    changed = (
        text[:at] + draw.draw(st.text('{}[],:"\\ne0123456789', max_size=3)) + text[at + draw.draw(st.integers(0, 2)) :]
    )
    try:
        form = decode_form(changed)
    except Refused:
        return
    assert encode_form(form) == changed


def nested(levels: int) -> str:
    return '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "1", "null", "{", '{"a":1,"a":1}', '{"b":1,"a":1}', '{"a": 1}', '{"a":NaN}', '{"a":Infinity}',
        '{"a":1e400}', '{"a":1.0e1}', '{"a":"\u00e9"}',
        '{"a":' + "9" * 5000 + "}", '{"a":"' + "x" * MAX_CHARACTERS + '"}',
        nested(MAX_LEVELS + 1), "[" * 60_000, '{"a":' * 60_000, 5, None,
    ],
    ids=lambda text: repr(text)[:20],
)  # fmt: skip
def test_hostile_forms_of_wrappers_are_refused(text: Any) -> None:
    with pytest.raises(Refused):
        decode_form(text)


def test_forms_beyond_the_size_limits_are_rejected() -> None:
    assert decode_form(nested(MAX_LEVELS)) == json.loads(nested(MAX_LEVELS))
    for form in ({"a": "x" * MAX_CHARACTERS}, json.loads(nested(MAX_LEVELS + 1)), {"a": float("nan")}, {"a": {1}}):
        with pytest.raises(InvalidInput):
            encode_form(form)


def test_the_differences_of_two_forms_name_paths_and_both_values() -> None:
    kernel = {"_type": "KernelPreference", "_data": "AUTO"}
    here = {"context": {"blocks": [1, 32], "kernel": kernel, "new": None}, "shape": [2, 3]}
    there = {"context": {"blocks": [1, 64], "kernel": {**kernel, "_data": "TORCH"}}, "shape": [2]}
    assert list(differences(here, there)) == [
        "context.blocks[1] is 32 here, but 64",
        'context.kernel._data is "AUTO" here, but "TORCH"',
        "shape is [2, 3] here, but [2]",
    ]
    assert list(differences({"a": True}, {"a": 1})) == ["a is true here, but 1"]
