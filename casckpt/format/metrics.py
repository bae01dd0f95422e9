"""Metrics and metadata of a checkpoint in the form in which its commit record and manifest hold them.

A listing finds metrics in the record, without the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, TypeAlias

import msgspec

from casckpt.base.names import MAX_METRIC_NAME, MAX_METRICS
from casckpt.errors import InvalidInput, Refused

MAX_METADATA_BYTES = 64 << 10
"""The commit record also holds the metadata of the user, up to this many bytes of JSON, so that listings show it."""
MAX_METADATA_DEPTH = 32
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


def encode_metadata(metadata: Mapping[str, Any]) -> tuple[msgspec.Raw, dict[str, Any] | None]:
    """Encode the user's metadata for the manifest and for the commit record (None if that cannot hold it exactly).

    Raises InvalidInput as `plain_metadata` does.
    """
    plain = plain_metadata(metadata)
    text = msgspec.json.encode(plain)
    exact = len(text) <= MAX_METADATA_BYTES and msgspec.json.decode(text) == plain
    return msgspec.Raw(msgspec.msgpack.encode(plain)), plain if exact else None


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the user's metadata: None, bool, int, float, str, and lists and str-keyed dicts of them.

    Scalars of numpy and tensors of no dimensions become numbers, and paths become text. Raises InvalidInput for
    anything else.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata is a dict of names to values, not a {type(metadata).__name__}")
    try:
        return {key: _plain(value, f"metadata[{key!r}]", 1) for key, value in _items(metadata, "metadata")}
    except UnicodeEncodeError as error:
        raise InvalidInput("metadata holds text with a lone surrogate, which no JSON can hold; replace it") from error


def _items(found: Mapping[Any, Any], path: str) -> Iterable[tuple[str, Any]]:
    for key in found:
        if type(key) is not str:
            raise InvalidInput(f"{path} has the key {key!r:.80}; the keys of metadata are text: give str() of it")
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
        f"{path} is a {kind.__name__}; metadata holds None, bool, int (64 bits), float, str, paths, scalars of numpy, "
        "tensors of no dimensions, and lists and dicts with str keys of them. Put anything else into the state, or "
        "into an attachment"
    )
