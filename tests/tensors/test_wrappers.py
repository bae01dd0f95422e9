"""Wrappers are flattened and rebuilt. Hostile forms and inner tensors are refused, and no other error is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import casckpt
from casckpt.format.forms import encode_form
from casckpt.format.tree import TENSOR, Wrapper
from casckpt.tensors.kinds import KINDS
from casckpt.tensors.wrappers import Wrapped, opened, restored
from tests.support.wrappers import Scaled, check_rebuilt, rebuild, scaled

MAKE: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "hand-made": lambda: scaled(1, 4, 4),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    casckpt.register_wrapper(Scaled, rebuild=rebuild)
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


def test_a_wrapper_of_an_unknown_kind_is_read_as_its_parts() -> None:
    node = Wrapper('{"dtype":"int8","kind":"os:system","shape":[]}', {"a": TENSOR})
    made = restored("w", node, {"a": torch.ones(1)})
    assert type(made) is Wrapped
    again = opened("w", made)
    assert again is not None
    assert encode_form(again.form) == node.form
