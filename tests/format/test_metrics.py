"""Metrics are decoded from a record as the same numbers, and errors name values that are not numbers."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.names import MAX_METRIC_NAME, MAX_METRICS
from casckpt.errors import Refused
from casckpt.format import records
from casckpt.format.manifest import decode, encode
from casckpt.format.metrics import (
    check_metrics,
    encode_metadata,
    metric_values,
    plain_metadata,
    python_value,
    stored_metrics,
)
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import Committed
from tests.support.repositories import draft

TXID = TxId("20260102T030405000000Z-00000000000000ab-00000000000000cd-7")
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=MAX_METRIC_NAME)
NUMBERS = st.floats() | st.integers(-(2**63) + 1, 2**63 - 1)


@given(st.dictionaries(NAMES, NUMBERS, max_size=MAX_METRICS))
def test_metrics_decode_from_a_record(metrics: dict[str, float]) -> None:
    stored = stored_metrics(metrics, [])
    record = Committed(
        txid=TXID, run="a", step=7, time=1, manifest=ManifestId("0" * 64), head="0" * 64,
        manifest_bytes=1, created_at=1, store="s", who="ann@node3", bytes_total=0, metrics=stored,
    )  # fmt: skip
    found: dict[str, Any] = records.decode(records.encode(record), Committed, "key").metrics
    values = metric_values(found)
    assert values.keys() == metrics.keys()
    for name, value in metrics.items():
        assert values[name] == value or (math.isnan(value) and math.isnan(values[name]))
        assert type(values[name]) is type(value)
    assert stored_metrics(found, []) == stored, "what is stored may be given again"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (np.float32(0.5), 0.5), (np.int64(3), 3), (np.float64("nan"), "nan"), (-math.inf, "-inf"), ("inf", "inf"),
        (10**30, 1e30), (Fraction(1, 4), 0.25), (0, 0),
    ],
)  # fmt: skip
def test_numpy_and_torch_numbers_are_valid_metrics(value: Any, stored: Any) -> None:
    found = stored_metrics({"x": value}, [])["x"]
    assert found == stored
    assert type(found) is type(stored)
    assert stored_metrics(None, []) == {}


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (True, 1), (np.True_, 1), (torch.tensor(False), 0), (torch.tensor([0.5]), 0.5), (np.array([[0.5]]), 0.5),
        (torch.tensor([[2]], requires_grad=False), 2),
    ],
)  # fmt: skip
def test_bool_and_arrays_with_one_element_are_metrics(value: Any, want: float) -> None:
    left: list[str] = []
    found = stored_metrics({"val/loss": value}, left)["val/loss"]
    assert (found, type(found), left) == (want, type(want), [])


@pytest.mark.parametrize(
    "value",
    [
        "0.3", "NaN", None, 1j, [1.0], Decimal(1), 10**400, object(), {"loss": 1.0}, torch.ones(2),
        torch.ones(1, device="meta"),
    ],
)  # fmt: skip
def test_a_metric_that_is_not_a_number_is_left_out_and_named(value: Any) -> None:
    left: list[str] = []
    assert stored_metrics({"ok": 1.0, "val/loss": value}, left) == {"ok": 1.0}
    assert left == ["val/loss"]


@pytest.mark.parametrize("name", ["", "x" * (MAX_METRIC_NAME + 1), "a\nb", "\ud800", 3, None])
def test_a_metric_with_an_invalid_name_is_left_out(name: Any) -> None:
    left: list[str] = []
    assert stored_metrics({name: 1.0, "ok": 2}, left) == {"ok": 2}
    assert left == [str(name)]


def test_of_too_many_metrics_those_in_first_and_the_first_by_name_are_stored() -> None:
    left: list[str] = []
    many = {f"{n:03}": n for n in range(MAX_METRICS + 2)}
    assert stored_metrics(many, left, first=["065"]) == {name: many[name] for name in many if name not in left}
    assert left == ["063", "064"]


def test_metrics_that_are_not_a_mapping_are_left_out() -> None:
    left: list[str] = []
    assert stored_metrics([("loss", 1.0)], left) == {}
    assert left == ["(a list instead of a dict)"]


@pytest.mark.parametrize("stored", [{"x": "much"}, {"": 1}, {str(n): n for n in range(MAX_METRICS + 1)}])
def test_a_record_with_invalid_metrics_is_rejected(stored: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        check_metrics(stored)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (torch.tensor(0.5, requires_grad=True), 0.5), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(3), 3), (torch.tensor(True), True), (np.float32(0.5), 0.5), (np.array(2), 2), (np.str_("a"), "a"),
        ("a", "a"), ([1], [1]), (None, None),
    ],
)  # fmt: skip
def test_a_value_without_dimensions_becomes_a_python_number(value: Any, want: Any) -> None:
    found = python_value(value)
    assert found == want
    assert type(found) is type(want)


def test_a_tensor_with_dimensions_is_returned_unchanged() -> None:
    tensor = torch.ones(2)
    assert python_value(tensor) is tensor


class Distributed:
    """A class with the attributes of torch's DTensor."""

    shape = ()

    def full_tensor(self) -> None:
        """A collective."""


@pytest.mark.parametrize("value", [torch.ones((), device="meta"), Distributed()])
def test_a_tensor_without_a_value_in_this_process_is_returned_unchanged(value: Any) -> None:
    assert python_value(value) is value


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


def test_metadata_that_json_cannot_represent_is_stored_only_in_the_manifest() -> None:
    for value in (math.nan, math.inf, "x" * (64 << 10)):
        raw, short = encode_metadata({"v": value})
        assert short is None
        assert repr(msgspec.msgpack.decode(raw)["v"]) == repr(value)
    assert encode_metadata(plain_metadata({"t": (1, 2)}, []))[1] == {"t": [1, 2]}


def test_metadata_that_json_cannot_represent_is_left_out_and_named() -> None:
    left: list[str] = []
    given = {
        "a": {"b": b"x", "c": [1]},
        "d": [{"e": object(), "f": 2}],
        "g": [1, {2}],
        3: 4,
        "h": "\ud800",
        "i": 1,
        "j": 2**63,
    }
    assert plain_metadata(given, left) == {"a": {"c": [1]}, "d": [{"f": 2}], "i": 1}
    assert left == [
        "metadata['a']['b']", "metadata['d'][0]['e']", "metadata['g']", "metadata[3]", "metadata['h']",
        "metadata['j']",
    ]  # fmt: skip
    assert plain_metadata("text", left) == {}
    assert left[-1] == "metadata (a str instead of a dict)"


def test_metadata_that_contains_itself_is_left_out() -> None:
    loop: list[Any] = []
    loop.append(loop)
    left: list[str] = []
    assert plain_metadata({"a": loop}, left) == {}
    assert left == ["metadata['a']"]
