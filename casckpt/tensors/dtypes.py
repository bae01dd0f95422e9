"""torch's dtypes and the names under which they are stored."""

from __future__ import annotations

from functools import cache

import torch

from casckpt.errors import InvalidInput, Unsupported
from casckpt.format import dtypes


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the stored name. Raises InvalidInput for what cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in dtypes.DTYPES:
        raise InvalidInput(f"tensors of {dtype} cannot be stored; convert them to another dtype first")
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a stored name. Raises Refused if it is not known, Unsupported if this torch lacks it."""
    dtypes.itemsize(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(f"torch {torch.__version__} has no dtype {name}; load with a newer torch")
    return found


@cache
def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether torch can convert one dtype to the other without dropping a part of a number."""
    if source.is_complex and not target.is_complex:
        return False
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except RuntimeError:  # of torch 2.6; later ones raise NotImplementedError, which is one
        return False
    return True
