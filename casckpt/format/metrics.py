"""Converts a checkpoint's metrics and metadata to the form in which its commit record and manifest store them.

A listing reads metrics from the record and does not need the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import isfinite, prod
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import msgspec

from casckpt.base.names import MAX_METRIC_NAME, MAX_METRICS
from casckpt.errors import Refused

MAX_METADATA_BYTES = 64 << 10
"""The maximum size, in JSON bytes, of metadata that the commit record also contains, so that listings show it."""
MAX_METADATA_DEPTH = 32
LINEAGE: Final = ("resumed_from", "imported_from", "merged_from")
"""The notes of a manifest that say where the saved state came from. The commit record also contains them."""
_TEXTS = ("nan", "inf", "-inf")  # JSON cannot represent these as numbers
_UNFIT_RE, _SURROGATE_RE = re.compile("[\0-\x1f\x7f\ud800-\udfff]"), re.compile("[\ud800-\udfff]")

Stored: TypeAlias = int | float | str
"""A number in a record: a finite number, or one of three strings."""


def stored_metrics(given: Any, left: list[str], *, first: Collection[str] = ()) -> dict[str, Stored]:
    """Convert a caller's metrics, which map names to real numbers, bool, or tensors and arrays with one element.

    Metrics that cannot be stored are left out, and ``left`` receives their names. If there are too many, those in
    ``first`` and then the first by name are kept.
    """
    if not isinstance(given, Mapping):
        left += [] if given is None else [f"(a {type(given).__name__} instead of a dict)"]
        return {}
    stored = dict[str, Stored]()
    for name in sorted(given, key=lambda name: (name not in first, str(name))):
        number = _stored(given[name]) if _is_name(name) and len(stored) < MAX_METRICS else None
        if number is None:
            left.append(str(name))
        else:
            stored[name] = number
    return {name: stored[name] for name in given if name in stored}


def metric_values(stored: Mapping[str, Stored]) -> dict[str, float]:
    """Convert a record's metrics to numbers."""
    return {name: float(value) if isinstance(value, str) else value for name, value in stored.items()}


def check_metrics(stored: Mapping[str, Stored]) -> None:
    """Raise `Refused` for metrics that writers must not put into a record."""
    texts = {value for value in stored.values() if isinstance(value, str)}
    if len(stored) > MAX_METRICS or not all(map(_is_name, stored)) or not texts <= {*_TEXTS}:
        raise Refused(
            f"a record's metrics do not map names to numbers, or there are more than {MAX_METRICS}: {str(stored)[:100]}"
        )


def _is_name(name: Any) -> bool:
    return type(name) is str and 0 < len(name) <= MAX_METRIC_NAME and not _UNFIT_RE.search(name)


def _stored(given: Any) -> Stored | None:
    """Return a metric in stored form, or None if it is not a number."""
    value = python_value(given)
    if not isinstance(value, Real):
        return value if isinstance(value, str) and value in _TEXTS else None
    if isinstance(value, Integral) and abs(int(value)) < 1 << 63:
        return int(value)
    try:
        number = float(value)  # may be a numpy scalar
    except OverflowError:
        return None
    return number if isfinite(number) else str(number)


def python_value(value: Any) -> Any:
    """Return the Python value of a numpy scalar, or of a tensor or array with one element. Return others unchanged.

    A tensor may be on any device, and its graph is dropped. A tensor that has no value in this process is returned
    unchanged: one on the meta device, and a DTensor, of which each rank may hold only a part.
    """
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or prod(shape) != 1 or not hasattr(value, "item"):
        return value
    return value if getattr(value, "is_meta", False) or hasattr(value, "full_tensor") else value.item()


def encode_metadata(plain: Mapping[str, Any]) -> tuple[msgspec.Raw, dict[str, Any] | None]:
    """Encode plain metadata for the manifest and the commit record (None if the record cannot hold it exactly)."""
    text = msgspec.json.encode(plain)
    exact = len(text) <= MAX_METADATA_BYTES and msgspec.json.decode(text) == plain
    return msgspec.Raw(msgspec.msgpack.encode(plain)), dict(plain) if exact else None


def plain_metadata(metadata: Any, left: list[str], name: str = "metadata") -> dict[str, Any]:
    """Return a copy of the user's metadata, or of a different argument ``name``.

    It may contain None, bool, int, float, str, lists, and dicts with str keys. numpy scalars, and tensors and arrays
    with one element, become numbers, and paths become strings. Anything else is left out with the item of a dict that
    holds it, whose path ``left`` receives.
    """
    if isinstance(metadata, Mapping):
        return _items(metadata, name, 0, left)
    left.append(f"{name} (a {type(metadata).__name__} instead of a dict)")
    return {}


def _items(found: Mapping[Any, Any], path: str, depth: int, left: list[str]) -> dict[str, Any]:
    made = dict[str, Any]()
    if depth > MAX_METADATA_DEPTH:
        raise RecursionError
    for key, value in found.items():
        try:
            if type(key) is not str:
                raise _NotPlain
            made[_plain(key, path, depth, left)] = _plain(value, f"{path}[{key!r}]", depth + 1, left)
        except (_NotPlain, RecursionError) as error:
            if depth and isinstance(error, RecursionError):  # at the top, because a cycle may branch
                raise
            left.append(f"{path}[{key!r:.80}]")
    return made


class _NotPlain(Exception):
    """Metadata cannot represent a value."""


def _plain(given: Any, path: str, depth: int, left: list[str]) -> Any:
    value: Any = str(given) if isinstance(given, PurePath) else python_value(given)
    kind = type(value)
    if value is None or kind is bool or (kind is int and -(2**63) <= value < 2**63):
        return value
    if kind is str and not _SURROGATE_RE.search(value):
        return value
    if isinstance(value, float):
        return float(value)
    if kind in (list, tuple):
        if depth > MAX_METADATA_DEPTH:
            raise RecursionError
        return [_plain(item, f"{path}[{i}]", depth + 1, left) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _items(value, path, depth, left)
    raise _NotPlain
