"""Converts a checkpoint's metrics and metadata to the form in which its commit record and manifest store them.

A listing reads metrics from the record and does not need the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import isfinite
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
_UNFIT_RE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")

Stored: TypeAlias = int | float | str
"""A number in a record: a finite number, or one of three strings."""


def stored_metrics(given: Mapping[str, Any] | None) -> dict[str, Stored]:
    """Convert a caller's metrics, which map names to real numbers, numpy scalars or 0-d tensors.

    Raises an `InvalidInput` that names the metric.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"metrics is a {type(given).__name__}; pass a dict that maps names to numbers")
    if len(given) > MAX_METRICS:
        raise InvalidInput(f"{len(given)} metrics are too many: pass {MAX_METRICS} or fewer; metadata can hold more")
    for name in given:
        if not _is_name(name):
            raise InvalidInput(
                f"the metric name {str(name)[:40]!r} is not valid: pass a string of 1 to {MAX_METRIC_NAME} characters"
            )
    return {name: _stored(name, value) for name, value in given.items()}


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
    value = python_value(given, f"metric {name!r}")
    if isinstance(value, str) and value in _TEXTS:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        of_shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        raise InvalidInput(
            f"metric {name!r} is a {type(value).__name__}{of_shape}; pass a number, or a 0-dimensional tensor"
        )
    if isinstance(value, Integral) and abs(int(value)) < 1 << 63:
        return int(value)
    try:
        number = float(value)  # may be a numpy scalar
    except OverflowError as error:
        raise InvalidInput(f"metric {name!r} is too large; pass a number below 1e308") from error
    return number if isfinite(number) else str(number)


def python_value(value: Any, name: str) -> Any:
    """Return the Python value of a numpy scalar or a 0-d tensor or array, and all other values unchanged.

    A tensor may be on any device, and its graph is dropped. ``name`` is used in error messages. Raises InvalidInput
    for a tensor that has no value in this process.
    """
    if getattr(value, "shape", None) != ():
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


def plain_metadata(metadata: Mapping[str, Any], name: str = "metadata") -> dict[str, Any]:
    """Return a copy of the user's metadata, or of a different argument ``name``.

    It may contain None, bool, int, float, str, lists, and dicts with str keys.

    numpy scalars and 0-dimensional tensors become numbers, and paths become strings. Raises InvalidInput for anything
    else.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"{name} must be a dict that maps names to values, not a {type(metadata).__name__}")
    try:
        return {key: _plain(value, f"{name}[{key!r}]", 1) for key, value in _items(metadata, name)}
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{name} contains a string with a lone surrogate, which JSON cannot represent; replace it"
        ) from error


def _items(found: Mapping[Any, Any], path: str) -> Iterable[tuple[str, Any]]:
    for key in found:
        if type(key) is not str:
            raise InvalidInput(f"{path} has the key {key!r:.80}; metadata keys must be strings: convert it with str()")
        key.encode()  # a lone surrogate
    return found.items()


def _plain(given: Any, path: str, depth: int) -> Any:
    value: Any = str(given) if isinstance(given, PurePath) else python_value(given, path)
    kind = type(value)
    if isinstance(value, str):
        value.encode()  # a lone surrogate
    if value is None or kind in (bool, str) or (kind is int and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, float):
        return float(value)
    if depth > MAX_METADATA_DEPTH:
        raise InvalidInput(f"{path[:80]}...: metadata is nested more than {MAX_METADATA_DEPTH} levels deep; flatten it")
    if kind in (list, tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}[{key!r}]", depth + 1) for key, item in _items(value, path)}
    raise InvalidInput(
        f"{path} is a {kind.__name__}; metadata can hold None, bool, int (64 bits), float, str, paths, numpy "
        f"scalars, 0-dimensional tensors, and lists and dicts (with str keys) of these. Put anything else into the "
        f"state or an attachment"
    )
