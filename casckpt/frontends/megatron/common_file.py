"""``common.pt``: the common part as Megatron-core stores it, by ``torch.save``; read without running code from it."""

from __future__ import annotations

import io
import os
import pickle
from argparse import Namespace
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.tensors.objects import is_archive, refused_name

COMMON_NAME = "common.pt"
_DEEP = 20  # levels that are looked through; a value may contain itself

_LOCK = Lock()
if hasattr(os, "register_at_fork"):  # a fork while another thread reads would leave the child a lock that stays shut
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def packed(common: Any) -> bytes:
    """The contents of the file."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getvalue()


def read(data: bytes, where: str, allow_pickle: bool) -> Any:
    """What the file holds. ``where``: the checkpoint, for messages.

    Raises CheckpointingException, naming a class, for what needs ``allow_pickle``.
    """
    try:
        if allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        with _arguments_allowed():
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointingException(
            f"{COMMON_NAME} of {where} needs pickle ({refused_name(error)}), and loading one runs code from the store; "
            "pass allow_pickle=True if you trust whoever wrote it. Classes of Megatron-core are taken without that "
            "where megatron.core is imported, which registers them"
        ) from error


@contextmanager
def _arguments_allowed() -> Iterator[None]:
    """Let torch's restricted unpickler take the class of Megatron's arguments.

    What it takes is one list for the process, and torch takes off it what it put there, even if it was there before: so
    only what is missing is put there, by one thread at a time.
    """
    with _LOCK, safe_globals([kind for kind in (Namespace,) if kind not in get_safe_globals()]):
        yield


def classes_to_register(data: bytes) -> list[str]:
    """The classes in the file that torch's restricted unpickler takes only where somebody registered them."""
    if not is_archive(data):
        return []
    registered = [one[0] if isinstance(one, tuple) else one for one in get_safe_globals()]
    names = [(kind.__module__, kind.__qualname__) for kind in registered]
    found = {f"{module}.{name}" for module, name in names if f"c{module}\n{name}\n".encode() in data}  # GLOBAL opcodes
    return sorted(found.union(get_unsafe_globals_in_checkpoint(io.BytesIO(data))) - {_name(Namespace)})


def places_of(data: bytes, classes: Collection[str]) -> list[str]:
    """Where values of these classes are in the file; nothing if it cannot be read without running code from it."""
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
