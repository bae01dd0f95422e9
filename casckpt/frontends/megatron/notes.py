"""The attachment ``megatron.json``: what nobody could tell of the common part by what lies in the checkpoint.

Sharded tensors lie at the top of the tree, the common part at its place in the state dict. What of the common part
would have the flat key of a sharded tensor is stored under another name, which this says, as it lists its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from casckpt.errors import Refused
from casckpt.format.tree import find
from casckpt.tensors.state import flatten

NOTES_NAME = "megatron.json"

Name: TypeAlias = str | int
"""Of something at the top of a state dict."""


@dataclass(frozen=True)
class Notes:
    """``tensors``: flat keys of those of the common part. ``names``: the right ones of what is stored under others."""

    tensors: frozenset[str] = frozenset()
    names: Mapping[str, Name] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The contents of the attachment; nothing where there is nothing to say."""
        if not self.tensors and not self.names:
            return b""
        found: dict[str, Any] = {"common_tensors": sorted(self.tensors)}
        return json.dumps(found | ({"common_names": dict(self.names)} if self.names else {})).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Notes:
        """Raises Refused for what it cannot be."""
        try:
            found = json.loads(data)
            tensors, names = found["common_tensors"], dict(found.get("common_names", {}))
            if not all(isinstance(name, Name) for name in names.values()):
                raise TypeError("a name is neither a text nor a number")
            return cls(frozenset(str(key) for key in tensors), names)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refused(f"the attachment {NOTES_NAME} is not usable: {error!r}") from error


def set_apart(common: Mapping[Any, Any], keys: Collection[str]) -> tuple[dict[Any, Any], Notes]:
    """The common part as it can lie beside sharded tensors of these keys, and what is to be noted of it."""
    stored: dict[Any, Any] = {}
    names: dict[str, Name] = {}
    for key, value in common.items():
        name = key
        if isinstance(key, Name) and _collides(key, value, keys):
            taken = {*map(str, common), *names}
            name = next(one for one in _other_names(key) if one not in taken and not _collides(one, value, keys))
            names[name] = key
        stored[name] = value
    tensors = (key for key, leaf in flatten(stored).leaves.items() if leaf.is_tensor)
    return stored, Notes(frozenset(tensors), names)


def _other_names(key: Name) -> Iterator[str]:
    yield f"{key} (common)"
    yield from (f"{key} (common {number})" for number in count(2))


def _collides(name: Name, value: Any, keys: Collection[str]) -> bool:
    """Has a leaf or a container of it one of these flat keys, or its place at the top?"""
    within = [key for key in keys if key.startswith(f"{name}.")]
    if str(name) in keys or not within:
        return str(name) in keys
    tree = flatten({name: value}).tree
    return any(find(tree, key) is not None for key in within)
