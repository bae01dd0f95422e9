"""Converts between torch's dtypes and their stored names."""

from __future__ import annotations

from functools import cache

import torch

from casckpt.errors import InvalidInput, Mismatch, Unsupported
from casckpt.format import dtypes


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's stored name. Raises InvalidInput for a dtype that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in dtypes.DTYPES:
        raise InvalidInput(f"tensors of {dtype} cannot be stored; convert them to a different dtype first")
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype with this stored name.

    Raises Refused for an unknown name, and Unsupported if this version of torch lacks the dtype.
    """
    dtypes.itemsize(name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(
            f"torch {torch.__version__} does not have the dtype {name}; load with a newer version of torch"
        )
    return dtype


@cache
def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch can convert ``source`` to ``target`` without dropping imaginary parts."""
    if source.is_complex and not target.is_complex:
        return False
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except RuntimeError:  # in torch after 2.6, the subclass NotImplementedError
        return False
    return True


def check_cast(key: str, stored: torch.dtype, here: torch.dtype, *, cast: bool, where: str) -> None:
    """Raise Mismatch unless ``cast`` is set and torch can convert the dtype ``stored`` to ``here``.

    ``where``: the name of the function that accepts ``cast``, for the message.
    """
    possible = converts(stored, here)
    if not possible or not cast:
        raise Mismatch(
            f"{key!r} is {dtype_name(here)} here, but {dtype_name(stored)} in the checkpoint; "
            + (f"pass cast=True to {where}" if possible else "torch cannot convert one to the other"),
            key=key,
        )
