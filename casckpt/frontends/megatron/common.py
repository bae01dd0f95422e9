"""The common part in a checkpoint: the file ``common.pt``, and the attachment ``megatron.json``.

``common.pt`` is the common part as Megatron-core stores it, by ``torch.save``; it is read without running code from it.

``megatron.json`` says what nobody could tell of the common part by what lies in the checkpoint. Sharded tensors lie at
the top of the tree, the common part at its place in the state dict. What of the common part would have the flat key of
a sharded tensor is stored under another name, which this says, as it lists its tensors.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from casckpt.errors import Refused
from casckpt.format.tree import find
from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.tensors.objects import is_archive, refused_name
from casckpt.tensors.state import flatten

COMMON_NAME = "common.pt"
_DEEP = 20  # levels that are looked through; a value may contain itself

_LOCK = Lock()
if hasattr(os, "register_at_fork"):  # a fork while another thread reads would leave the child a lock that stays shut
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def read(data: bytes, where: str, allow_pickle: bool) -> Any:
    """Give what the file holds. ``where``: the checkpoint, for messages.

    Raises CheckpointingException, naming a class, for what needs ``allow_pickle``.
    """
    try:
        if allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        # What torch's restricted unpickler takes is one list for the process, and torch takes off it what it put there,
        # even if it was there before: so only what is missing is put there, by one thread at a time.
        with _LOCK, safe_globals([kind for kind in (Namespace,) if kind not in get_safe_globals()]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointingException(
            f"{COMMON_NAME} of {where} needs pickle ({refused_name(error)}), and loading one runs code from the store; "
            "pass allow_pickle=True if you trust whoever wrote it. Classes of Megatron-core are taken without that "
            "where megatron.core is imported, which registers them"
        ) from error


def classes_to_register(data: bytes) -> list[str]:
    """The classes in the file that torch's restricted unpickler takes only where somebody registered them."""
    if not is_archive(data):
        return []
    registered = [one[0] if isinstance(one, tuple) else one for one in get_safe_globals()]
    names = [(kind.__module__, kind.__qualname__) for kind in registered]
    found = {f"{module}.{name}" for module, name in names if f"c{module}\n{name}\n".encode() in data}  # GLOBAL opcodes
    return sorted(found.union(get_unsafe_globals_in_checkpoint(io.BytesIO(data))) - {_name(Namespace)})


def places_of(data: bytes, classes: Collection[str]) -> list[str]:
    """Tell where values of these classes are in the file; nothing if it cannot be read without running code from it."""
    try:
        return list(_places(read(data, COMMON_NAME, allow_pickle=False), classes, ""))
    except CheckpointingException:
        return []


def _places(value: Any, classes: Collection[str], at: str) -> Iterator[str]:
    if _name(type(value)) in classes:
        yield at
    elif isinstance(value, Namespace) and at.count(".") < _DEEP:
        yield from _places(vars(value), classes, at)
    elif isinstance(value, dict | list | tuple) and at.count(".") < _DEEP:
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(child, classes, f"{at}.{key}" if at else str(key))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
    """Tell whether a leaf or a container of it has one of these flat keys, or its place at the top."""
    within = [key for key in keys if key.startswith(f"{name}.")]
    if str(name) in keys or not within:
        return str(name) in keys
    tree = flatten({name: value}).tree
    return any(find(tree, key) is not None for key in within)
