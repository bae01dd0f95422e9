"""Conversion of numpy scalars and 0-d tensors to Python values."""

from __future__ import annotations

from typing import Any

from casckpt.errors import InvalidInput


def python_value(value: Any, name: str) -> Any:
    """Return the Python value of a numpy scalar, or of a 0-d tensor or array; other values unchanged.

    A tensor may be on any device; its graph is not kept. ``name``: for the error. Raises InvalidInput for a tensor
    that has no value here.
    """
    if getattr(value, "shape", None) != ():
        return value
    if getattr(value, "is_meta", False):
        raise InvalidInput(f"{name} is a tensor on the meta device, which has no value; give a number")
    if hasattr(value, "full_tensor"):
        raise InvalidInput(f"{name} is a DTensor, of which each rank may have a part; give its full_tensor()")
    return value.item()
