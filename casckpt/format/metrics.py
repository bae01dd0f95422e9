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
from casckpt.errors import InvalidInput, Refused

MAX_METADATA_BYTES = 64 << 10
"""The maximum size, in JSON bytes, of metadata that the commit record also contains, so that listings show it."""
MAX_METADATA_DEPTH = 32
LINEAGE: Final = ("resumed_from", "imported_from", "merged_from")
"""The notes of a manifest that say where the saved state came from. The commit record also contains them."""
_TEXTS = ("nan", "inf", "-inf")  # JSON cannot represent these as numbers
_UNFIT_RE, _SURROGATE_RE = re.compile("[\0-\x1f\x7f\ud800-\udfff]"), re.compile("[\ud800-\udfff]")

Stored: TypeAlias = int | float | str
"""A number in a record: a finite number, or one of three strings."""


def stored_metrics(given: Any, left: list[str] | None = None, *, first: Collection[str] = ()) -> dict[str, Stored]:
    """Convert a caller's metrics, which map names to real numbers, bool, or tensors and arrays with one element.

    Metrics that cannot be stored are left out, and ``left`` receives their names. If there are too many, those in
    ``first`` and then the first by name are kept.
    """
    if not isinstance(given, Mapping | None):
        given = {f"(a {type(given).__name__} instead of a dict)": None}
    stored, left = dict[str, Stored](), [] if left is None else left
    for name in sorted(given or (), key=lambda name: (name not in first, str(name))):
        try:
            if len(stored) == MAX_METRICS or not _is_name(name):
                raise InvalidInput("only a limited number of metrics with valid names can be stored")
            stored[name] = _stored(name, (given or {})[name])
        except InvalidInput:
            left.append(str(name))
    return {name: stored[name] for name in given or () if name in stored}


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


def _stored(name: str, given: Any) -> Stored:
    value = python_value(given, f"metric {name!r}", any_shape=True)
    if isinstance(value, str) and value in _TEXTS:
        return value
    if not isinstance(value, Real):
        raise InvalidInput(f"metric {name!r} is a {type(value).__name__}; pass a number")
    if isinstance(value, Integral) and abs(int(value)) < 1 << 63:
        return int(value)
    try:
        number = float(value)  # may be a numpy scalar
    except OverflowError as error:
        raise InvalidInput(f"metric {name!r} is too large; pass a number below 1e308") from error
    return number if isfinite(number) else str(number)


def python_value(value: Any, name: str, *, any_shape: bool = False) -> Any:
    """Return the Python value of a numpy scalar or a 0-d tensor or array, and all other values unchanged.

    ``any_shape``: also convert other tensors and arrays with one element. A tensor may be on any device, and its graph
    is dropped. ``name`` is used in error messages. Raises InvalidInput for a tensor that has no value in this process.
    """
    shape = getattr(value, "shape", None)
    if shape != () and not (any_shape and shape and prod(shape) == 1 and hasattr(value, "item")):
        return value
    if getattr(value, "is_meta", False):
        raise InvalidInput(f"{name} is a tensor on the meta device, which has no value; pass a number")
    if hasattr(value, "full_tensor"):
        raise InvalidInput(f"{name} is a DTensor, and each rank may hold only a part of it; pass its full_tensor()")
    return value.item()


def encode_metadata(metadata: Mapping[str, Any]) -> tuple[msgspec.Raw, dict[str, Any] | None]:
    """Encode the user's metadata for the manifest and the commit record (None if the record cannot hold it exactly).

    Raises InvalidInput in the same cases as `plain_metadata`.
    """
    plain = plain_metadata(metadata)
    text = msgspec.json.encode(plain)
    exact = len(text) <= MAX_METADATA_BYTES and msgspec.json.decode(text) == plain
    return msgspec.Raw(msgspec.msgpack.encode(plain)), plain if exact else None


def plain_metadata(metadata: Any, name: str = "metadata", *, left: list[str] | None = None) -> dict[str, Any]:
    """Return a copy of the user's metadata, or of a different argument ``name``.

    It may contain None, bool, int, float, str, lists, and dicts with str keys. numpy scalars and 0-dimensional tensors
    become numbers, and paths become strings. Anything else is left out with the item of a dict that holds it, whose
    path ``left`` receives. Raises InvalidInput instead if ``left`` is None.
    """
    if isinstance(metadata, Mapping):
        return _items(metadata, name, 0, left)
    if left is None:
        raise InvalidInput(f"{name} must be a dict that maps names to values, not a {type(metadata).__name__}")
    left.append(f"{name} (a {type(metadata).__name__} instead of a dict)")
    return {}


def _items(found: Mapping[Any, Any], path: str, depth: int, left: list[str] | None) -> dict[str, Any]:
    made = dict[str, Any]()
    for key, value in found.items():
        try:
            if type(key) is not str:
                raise InvalidInput(
                    f"{path} has the key {key!r:.80}; metadata keys must be strings: convert it with str()"
                )
            _check_text(key, path)
            made[key] = _plain(value, f"{path}[{key!r}]", depth + 1, left)
        except InvalidInput:
            if left is None:
                raise
            left.append(f"{path}[{key!r:.80}]")
    return made


def _check_text(text: str, path: str) -> None:
    if _SURROGATE_RE.search(text):
        raise InvalidInput(f"{path} contains a string with a lone surrogate, which JSON cannot represent; replace it")


def _plain(given: Any, path: str, depth: int, left: list[str] | None) -> Any:
    value: Any = str(given) if isinstance(given, PurePath) else python_value(given, path)
    kind = type(value)
    if isinstance(value, str):
        _check_text(value, path)
    if value is None or kind in (bool, str) or (kind is int and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, float):
        return float(value)
    if depth > MAX_METADATA_DEPTH:
        raise InvalidInput(f"{path[:80]}...: metadata is nested more than {MAX_METADATA_DEPTH} levels deep; flatten it")
    if kind in (list, tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1, left) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _items(value, path, depth, left)
    raise InvalidInput(
        f"{path} is a {kind.__name__}; metadata can hold None, bool, int (64 bits), float, str, paths, numpy "
        f"scalars, 0-dimensional tensors, and lists and dicts (with str keys) of these. Put anything else into the "
        f"state or an attachment"
    )
