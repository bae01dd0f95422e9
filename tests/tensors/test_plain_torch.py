"""dtype, Size and device of torch as plain data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.plain import Tagged
from casckpt.tensors.plain_torch import TORCH_EXTENSIONS
from tests.support.exact import same
from tests.support.ids import named

VALUES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex32,
    torch.Size([2, 0, 3]),
    torch.Size([]),
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
]


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_a_value_decodes_exactly(value: Any) -> None:
    data = plain.encode({"x": [value]}, extensions=TORCH_EXTENSIONS)
    assert same(plain.decode(data, extensions=TORCH_EXTENSIONS), {"x": [value]})


def test_every_dtype_comes_back() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    data = plain.encode(dtypes, extensions=TORCH_EXTENSIONS)
    assert plain.decode(data, extensions=TORCH_EXTENSIONS) == dtypes


def test_torch_types_are_shown_without_torch() -> None:
    data = plain.encode(VALUES[:1] + VALUES[3:4], extensions=TORCH_EXTENSIONS)
    assert plain.decode(data) == [Tagged("torch.dtype", "bfloat16"), Tagged("torch.Size", (2, 0, 3))]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.Generator(), r"a torch.Generator cannot be stored as plain data; store its get_state\(\)"),
        ({torch.zeros(1)}, "a tensor cannot be stored"),
        ([torch.nn.Parameter(torch.zeros(1))], "a parameter cannot be stored"),
        (torch.nn.Linear(1, 1), r"store its state_dict\(\)"),
    ],
)
def test_errors_for_refused_values_give_advice(value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plain.encode(value, extensions=TORCH_EXTENSIONS)


@pytest.mark.parametrize(
    "wire",
    [
        ["torch.dtype", "Tensor"],
        ["torch.dtype", 1],
        ["torch.dtype"],
        ["torch.Size", ["tuple", -1]],
        ["torch.Size", ["tuple", 2**63]],
        ["torch.Size", 3],
        ["torch.device", "cpu"],
        ["torch.device", ["tuple", "no such", None]],
        ["torch.device", ["tuple", 3, None]],
        ["torch.device", ["tuple", "cuda", 0, 1]],
        ["torch.device", ["tuple", "cuda", -1]],
        ["torch.device", ["tuple", "cuda", 128]],
        ["torch.device", ["tuple", "cuda", True]],
        ["torch.device", ["tuple", "cuda", 10**6]],
        ["torch.Generator", 1],
        ["torch.Tensor", 1],
    ],
    ids=named,
)
def test_hostile_payloads_are_refused(wire: Any) -> None:
    with pytest.raises(Refused):
        plain.decode(msgspec.msgpack.encode(wire), extensions=TORCH_EXTENSIONS)
