"""The user's metadata: plain values that both a manifest and a record of JSON can hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from casckpt.errors import InvalidInput
from casckpt.format.metrics import python_value
from casckpt.format.records import MAX_METADATA_BYTES

MAX_METADATA_DEPTH = 32


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
