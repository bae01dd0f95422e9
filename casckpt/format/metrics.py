"""Metrics of a checkpoint in its commit record, where a listing finds them without the manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeAlias

from casckpt.base.names import MAX_METRIC_NAME, MAX_METRICS
from casckpt.errors import InvalidInput, Refused


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


_TEXTS = ("nan", "inf", "-inf")  # JSON has no numbers for these
_UNFIT_RE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")

Stored: TypeAlias = int | float | str
"""A number in a record: finite, or one of three texts."""


def stored_metrics(given: Mapping[str, Any] | None) -> dict[str, Stored]:
    """Convert metrics of a caller: names with real numbers, also of numpy, or with 0-d tensors.

    Raises `InvalidInput`, naming the metric.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"metrics is a {type(given).__name__}; give a dict of names to numbers")
    if len(given) > MAX_METRICS:
        raise InvalidInput(f"{len(given)} metrics are too many: give {MAX_METRICS} or fewer; metadata holds more")
    for name in given:
        if not _is_name(name):
            raise InvalidInput(
                f"the name of metric {str(name)[:40]!r} is not usable: give text of 1 to {MAX_METRIC_NAME} characters"
            )
    return {name: _stored(name, value) for name, value in given.items()}


def metric_values(stored: Mapping[str, Stored]) -> dict[str, float]:
    """Convert the metrics of a record to numbers."""
    return {name: float(value) if isinstance(value, str) else value for name, value in stored.items()}


def check_metrics(stored: Mapping[str, Stored]) -> None:
    """Raise `Refused` for metrics that no writer may put into a record."""
    texts = {value for value in stored.values() if isinstance(value, str)}
    if len(stored) > MAX_METRICS or not all(map(_is_name, stored)) or not texts <= {*_TEXTS}:
        raise Refused(f"the metrics of a record are not names to numbers, {MAX_METRICS} at most: {str(stored)[:100]}")


def _is_name(name: Any) -> bool:
    return type(name) is str and 0 < len(name) <= MAX_METRIC_NAME and not _UNFIT_RE.search(name)


def _stored(name: str, given: Any) -> Stored:
    value = python_value(given, f"metric {name!r}")
    if isinstance(value, str) and value in _TEXTS:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        of_shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        raise InvalidInput(
            f"metric {name!r} is a {type(value).__name__}{of_shape}; give a number, or a tensor of no dimensions"
        )
    if isinstance(value, Integral) and abs(int(value)) < 1 << 63:
        return int(value)
    try:
        number = float(value)  # it may be numpy's
    except OverflowError as error:
        raise InvalidInput(f"metric {name!r} is too large; give a number below 1e308") from error
    return number if isfinite(number) else str(number)
