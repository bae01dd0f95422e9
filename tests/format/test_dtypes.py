"""The table of dtypes agrees with torch and with safetensors."""

from __future__ import annotations

import pytest
import torch

from casckpt.errors import Refused
from casckpt.format.dtypes import DTYPES, itemsize, stored_itemsize, stored_name
from tests.support.tensors import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_dtype_sizes_match_torch(name: str) -> None:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    assert itemsize(name) == dtype.itemsize
    assert stored_itemsize(name) in (1, itemsize(name))
    assert (stored_name(name) == "U8") == (stored_itemsize(name) == 1 and name not in EIGHT_BITS)


EIGHT_BITS = ("bool", "int8", "float8_e4m3fn", "float8_e5m2")


NOT_STORED = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}
NEW = {"bcomplex32"}  # in torch 2.15


def test_every_torch_dtype_is_known_except_quantized_and_new_ones() -> None:
    names = {str(found).removeprefix("torch.") for found in vars(torch).values() if isinstance(found, torch.dtype)}
    assert names - set(DTYPES) - NEW == NOT_STORED


def test_an_unknown_dtype_name_is_rejected() -> None:
    for ask in (itemsize, stored_name, stored_itemsize):
        with pytest.raises(Refused, match="float3"):
            ask("float3")
