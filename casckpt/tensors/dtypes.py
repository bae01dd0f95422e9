"""Conversion between torch's dtypes and their stored names."""

from __future__ import annotations

from functools import cache

import torch

from casckpt.errors import InvalidInput, Mismatch, Unsupported
from casckpt.format import dtypes


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the stored name. Raises InvalidInput for a dtype that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in dtypes.DTYPES:
        raise InvalidInput(f"tensors of {dtype} cannot be stored; convert them to another dtype first")
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a stored name.

    Raises Refused for an unknown name, Unsupported if this torch lacks the dtype.
    """
    dtypes.itemsize(name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"torch {torch.__version__} has no dtype {name}; load with a newer torch")
    return dtype


@cache
def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch can convert one dtype to the other without dropping imaginary parts."""
    if source.is_complex and not target.is_complex:
        return False
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except RuntimeError:  # NotImplementedError, a subclass, after torch 2.6
        return False
    return True


def check_cast(key: str, stored: torch.dtype, here: torch.dtype, *, cast: bool, where: str) -> None:
    """Raise Mismatch unless ``cast`` is set and torch converts the ``stored`` dtype to the one ``here``.

    ``where``: the name of what takes ``cast``, for the message.
    """
    possible = converts(stored, here)
    if not possible or not cast:
        raise Mismatch(
            f"{key!r} is {dtype_name(here)} here, but {dtype_name(stored)} in the checkpoint; "
            + (f"pass cast=True to {where}" if possible else "torch cannot convert one to the other"),
            key=key,
        )
