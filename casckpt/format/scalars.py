"""Values without dimensions, as numpy and torch have them, as the Python values that records hold."""

from __future__ import annotations

from typing import Any

from casckpt.errors import InvalidInput


def python_value(value: Any, name: str) -> Any:
    """The bool, number or text of a numpy scalar, or of a tensor or array of no dimensions; other values as they are.

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
