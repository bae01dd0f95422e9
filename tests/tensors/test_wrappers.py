"""Wrappers are flattened and rebuilt. Hostile forms and inner tensors are refused, and no other error is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import casckpt
from casckpt.errors import InvalidInput, Refused
from casckpt.format.forms import Form, encode_form
from casckpt.format.tree import TENSOR, Wrapper
from casckpt.loading.wrapped import dequantizes, fill_dequantized
from casckpt.tensors.kinds import KINDS
from casckpt.tensors.shards import local_tensor
from casckpt.tensors.wrappers import Wrapped, opened, restored
from tests.support.wrappers import TENSORS, Scaled, changed, check_rebuilt, rebuild, scaled

MAKE: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "hand-made": lambda: scaled(1, 4, 4),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    casckpt.register_wrapper(Scaled, rebuild=rebuild, dequantize=Scaled.dequantize)
    yield
    del KINDS["tests:Scaled"]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=80)
@given(st.data())
def test_a_wrapper_with_a_changed_form_or_tensor_is_rebuilt_as_described_or_refused(
    name: str, draw: st.DataObject
) -> None:
    found = opened("w", MAKE[name]())
    assert found is not None
    check_rebuilt(found, draw)


@settings(max_examples=100)
@given(st.data())
def test_a_wrapper_with_changed_parts_is_loaded_as_described_or_refused(draw: st.DataObject) -> None:
    whole = '{"dtype":"float32","shape":[8]}'
    inner = {**opened_form(), "regions": [[[0], [8], 4, 8]]}
    if draw.draw(st.booleans()):
        inner["regions"] = changed(inner["regions"], draw)
    names = draw.draw(st.lists(st.sampled_from(["0", "2", "-1", "x", "9" * 30, "8"]), min_size=1, max_size=2))
    below = Wrapper(encode_form(inner), {"codes": TENSOR, "scale": TENSOR, "table": TENSOR})
    node = Wrapper(whole, {**dict.fromkeys(names, TENSOR), "4": below})
    value = Wrapped(whole, {**{name: draw.draw(TENSORS) for name in names}, "4": scaled(1, 4)})
    target = torch.zeros(8)
    assert dequantizes(node)
    with suppress(Refused, InvalidInput):  # nothing else may be raised
        fill_dequantized("w", node, value, local_tensor("w", target))


def opened_form() -> Form:
    found = opened("w", scaled(1, 4))
    assert found is not None
    return found.form


def test_a_wrapper_of_an_unknown_kind_is_read_as_its_parts() -> None:
    node = Wrapper('{"dtype":"int8","kind":"os:system","shape":[]}', {"a": TENSOR})
    made = restored("w", node, {"a": torch.ones(1)})
    assert type(made) is Wrapped
    again = opened("w", made)
    assert again is not None
    assert encode_form(again.form) == node.form
