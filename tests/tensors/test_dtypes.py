"""dtypes are named as torch names them."""

from __future__ import annotations

import pytest
import torch

from casckpt.errors import InvalidInput, Refused, Unsupported
from casckpt.format.dtypes import DTYPES
from casckpt.tensors.dtypes import dtype_name, torch_dtype
from tests.support.tensors import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_dtype_names_convert_in_both_directions(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name


def test_unsupported_dtypes_are_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"torch\.qint8 cannot be stored; convert"):
        dtype_name(torch.qint8)


@pytest.mark.parametrize("name", ["float3", "qint8", "Tensor", "nn", "__doc__"])
def test_unknown_dtype_names_are_rejected(name: str) -> None:
    with pytest.raises(Refused, match="not known to this version"):
        torch_dtype(name)


def test_dtypes_missing_from_the_installed_torch_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DTYPES, "float3", (1, "U8"))
    with pytest.raises(Unsupported, match="newer version of torch"):
        torch_dtype("float3")
