"""The common part of a checkpoint: the file ``common.pt`` and the attachment ``megatron.json``.

``common.pt`` holds the common part as Megatron-core stores it with ``torch.save``. Reading the file does not run code
from it.

``megatron.json`` describes the common part in the tree of a checkpoint. Sharded tensors are at the top of the tree,
and the values of the common part are under their keys in the state dict. The attachment lists the tensors of the
common part. It also lists the original names of values that are stored under a different name because a sharded tensor
has their flat key.
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

_LOCK = Lock()
# otherwise, a child that is forked during a read would inherit a locked lock
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def read(data: bytes, where: str, allow_pickle: bool) -> Any:
    """Read the contents of the file. ``where``: the checkpoint's name for messages.

    Raises CheckpointingException, naming a class, if the contents need ``allow_pickle``.
    """
    try:
        if allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        # The process has one list of classes for torch's restricted unpickler. When the context ends, torch removes the
        # classes that it added, even those that were listed before. Therefore, add only missing classes, and only in
        # one thread at a time.
        with _LOCK, safe_globals([kind for kind in (Namespace,) if kind not in get_safe_globals()]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointingException(
            f"{COMMON_NAME} of {where} needs to be unpickled ({refused_name(error)}), which runs code from the "
            "store; pass allow_pickle=True if you trust its source. Importing megatron.core registers "
            "Megatron-core's own classes, which then load without allow_pickle"
        ) from error


def classes_to_register(data: bytes) -> list[str]:
    """Return the names of the file's classes that torch's restricted unpickler accepts only if they are registered."""
    if not is_archive(data):
        return []
    registered = [kind[0] if isinstance(kind, tuple) else kind for kind in get_safe_globals()]
    names = [(kind.__module__, kind.__qualname__) for kind in registered if hasattr(kind, "__qualname__")]  # no dtypes
    used = {f"{module}.{name}" for module, name in names if f"c{module}\n{name}\n".encode() in data}  # GLOBAL opcodes
    return sorted(used.union(get_unsafe_globals_in_checkpoint(io.BytesIO(data))) - {"argparse.Namespace"})


NOTES_NAME = "megatron.json"

Name: TypeAlias = str | int
"""A key at the top of a state dict."""


@dataclass(frozen=True)
class Notes:
    """``tensors``: flat keys of the common part's tensors. ``names``: the original names of renamed values."""

    tensors: frozenset[str] = frozenset()
    names: Mapping[str, Name] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the contents of the attachment, which are empty if there is nothing to note."""
        if not self.tensors and not self.names:
            return b""
        notes: dict[str, Any] = {"common_tensors": sorted(self.tensors)}
        return json.dumps(notes | ({"common_names": dict(self.names)} if self.names else {})).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Notes:
        """Decode the attachment. Raises Refused for invalid contents."""
        try:
            notes = json.loads(data)
            tensors, names = notes["common_tensors"], dict(notes.get("common_names", {}))
            if not all(isinstance(name, Name) for name in names.values()):
                raise TypeError("a name is neither a string nor a number")
            return cls(frozenset(str(key) for key in tensors), names)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refused(f"the attachment {NOTES_NAME} is invalid: {error!r}") from error


def set_apart(common: Mapping[Any, Any], keys: Collection[str]) -> tuple[dict[Any, Any], Notes]:
    """Return the common part, with values renamed so that none of its flat keys is in ``keys``, and the notes on it."""
    stored: dict[Any, Any] = {}
    names: dict[str, Name] = {}
    for key, value in common.items():
        name = key
        if isinstance(key, Name) and _collides(key, value, keys):
            taken = {*map(str, common), *names}
            name = next(new for new in _other_names(key) if new not in taken and not _collides(new, value, keys))
            names[name] = key
        stored[name] = value
    tensors = (key for key, leaf in flatten(stored).leaves.items() if leaf.is_tensor)
    return stored, Notes(frozenset(tensors), names)


def _other_names(key: Name) -> Iterator[str]:
    yield f"{key} (common)"
    yield from (f"{key} (common {number})" for number in count(2))


def _collides(name: Name, value: Any, keys: Collection[str]) -> bool:
    """Return whether the value, or a leaf or container in it, has one of these flat keys."""
    within = [key for key in keys if key.startswith(f"{name}.")]
    if str(name) in keys or not within:
        return str(name) in keys
    tree = flatten({name: value}).tree
    return any(find(tree, key) is not None for key in within)
