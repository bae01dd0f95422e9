"""The user's metadata: plain values that both a manifest and a record of JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from casckpt.errors import InvalidInput
from casckpt.format.records import MAX_METADATA_BYTES

MAX_METADATA_DEPTH = 32


def encode_metadata(metadata: Mapping[str, Any]) -> tuple[msgspec.Raw, dict[str, Any] | None]:
    """Encode the user's metadata for the manifest and for the commit record (None if that cannot hold it exactly).

    Raises InvalidInput for anything but None, bool, int, float, str, and lists and str-keyed dicts of them.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata is a dict of names to values, not a {type(metadata).__name__}")
    plain = _plain(metadata, "metadata", 0)
    try:
        raw = msgspec.Raw(msgspec.msgpack.encode(plain))
        text = msgspec.json.encode(plain)
    except UnicodeEncodeError as error:
        raise InvalidInput("metadata holds text with a lone surrogate, which no JSON can hold; replace it") from error
    exact = len(text) <= MAX_METADATA_BYTES and msgspec.json.decode(text) == plain
    return raw, plain if exact else None


def _plain(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, float):
        return float(value)
    if depth > MAX_METADATA_DEPTH:
        raise InvalidInput(f"{path[:80]}...: metadata is nested more than {MAX_METADATA_DEPTH} levels deep; flatten it")
    if kind in (list, tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) is not str]:
            raise InvalidInput(f"{path} has the key {odd[0]!r:.80}; the keys of metadata are text: give str() of it")
        return {key: _plain(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    raise InvalidInput(
        f"{path} is a {kind.__name__}; metadata holds None, bool, int (64 bits), float, str, and lists and dicts with "
        "str keys of them. Put anything else into the state, or into an attachment"
    )
