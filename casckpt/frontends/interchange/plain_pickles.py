"""Reads files of torch.save. Without pickles, torch's restricted unpickler makes plain data by functions of our own.

These check what they are given as the reader of stored plain data does, because numpy's own functions would corrupt
memory. What they return has no items that take more time or memory than the file.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from datetime import date, datetime, time, timedelta, timezone
from io import BytesIO
from itertools import chain
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from threading import RLock
from types import NoneType
from typing import Any, Final

import torch
from torch.serialization import get_safe_globals, safe_globals

from casckpt.format.plain_codecs import STANDARD, Unfit, expect
from casckpt.format.plain_numpy import NUMPY, dtype_form, dtype_of

_CODECS: Final = {codec.tag: codec for codec in (*STANDARD, *NUMPY)}
_LOCK: Final = RLock()


class _Held:
    """A value that a pickle must not use, or that is not complete. `plain` returns it."""

    def __init__(self, value: Any, *_: Any) -> None:
        self.value = value


class _Array(_Held):
    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_transposed, data = state
        made = _numpy("ndarray", dtype, shape[::-1] if is_transposed else shape, data)
        self.value = made.T if is_transposed else made


class _Dtype(_Held):
    def __setstate__(self, state: Any) -> None:
        _, order, base, names, *_, flags = state
        unit = "" if type(flags) is int or flags[1][0] == b"generic" else f"[{flags[1][1]:d}{flags[1][0].decode()}]"
        try:
            self.value = dtype_of(order + self.value + unit if base is names is None else "structured")
        except ValueError as error:
            raise Unfit(f"it contains a numpy array or scalar of {error}") from error


class _Tag(_Held):
    """The first item of a list, or key of a dict, whose other items are those of the plain value with this tag."""


class _Attributes(dict[str, Any]):
    """The attributes of a namespace, whose tag is the name of a subclass."""

    __setstate__ = dict.update


def _numpy(kind: str, dtype: Any, *rest: Any) -> Any:
    return _CODECS[f"numpy.{kind}"].join([dtype_form(getattr(dtype, "value", dtype)), *rest])


def _checked(kind: Callable[..., Any], tag: str) -> Callable[..., Any]:
    return lambda *args: _CODECS[tag].join([*_CODECS[tag].split(kind(*args))])


_MAKERS: Final[dict[str, Any]] = {
    "argparse.Namespace": type("Namespace", (_Attributes,), {}), "_io.BytesIO": BytesIO, "builtins.bytes": lambda: b"",
    "types.SimpleNamespace": type("SimpleNamespace", (_Attributes,), {}), "builtins.frozenset": frozenset,
    "builtins.range": lambda *args: _Held(range(*args)), "numpy.dtype": _Dtype,
    "builtins.slice": lambda *args: slice(*expect(args, *[(int, NoneType)] * 3)),
    "collections.deque": lambda _=(), most=None: [_Tag("deque"), most], "numpy.ndarray": type("ndarray", (), {}),
    "collections.defaultdict": lambda kind="None": {_Tag("defaultdict"): getattr(kind, "__name__", kind)},
    **{f"builtins.{name}": type(name, (), {}) for name in ("list", "dict", "int", "float", "str", "tuple")},
    **{f"datetime.{one.__name__}": _checked(one, one.__name__) for one in (date, time, datetime, timedelta, timezone)},
    **{f"pathlib.{local}{name}": _checked(kind, "path") for local in ("", "_local.") for name, kind in (
        ("PosixPath", PosixPath), ("PurePosixPath", PurePosixPath),
        ("WindowsPath", PureWindowsPath), ("PureWindowsPath", PureWindowsPath))},
    **{f"numpy.{core}.multiarray.{name}": make for core in ("core", "_core") for name, make in (
        ("_reconstruct", _Array), ("scalar", lambda dtype, data: _numpy("scalar", dtype, data)))},
}  # fmt: skip
"""What each name in a pickle stands for. Classes without content stand for those that a pickle only names."""


def load(path: Path, *, mapped: bool, allow_pickle: bool) -> Any:
    """Return what torch reads, for `plain`. Raises UnpicklingError or Unfit, naming it, for what needs a pickle."""
    with _LOCK:  # the process has one list of names, from which torch removes those that it added
        own = {f[1] if type(f) is tuple else f"{f.__module__}.{getattr(f, '__name__', 0)}" for f in get_safe_globals()}
        with safe_globals([(make, name) for name, make in _MAKERS.items() if name not in own]):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=not allow_pickle)


def plain(value: Any) -> Any:
    """Return the value that a loaded one stands for, with the state_dict in place of a module or other whole object.

    Mappings and lists are changed in place.
    """
    if isinstance(value, _Held):
        return value.value
    if type(value) is tuple:
        return tuple(map(plain, value))
    if type(value) in (list, dict) and isinstance(tag := next(iter(value), None), _Tag):
        return _CODECS[tag.value].join([*map(plain, chain(*value.items()) if type(value) is dict else value)][1:])
    if isinstance(value, _Attributes):
        return _CODECS[type(value).__name__].join([*map(plain, chain(*value.items()))])
    if isinstance(value, MutableMapping | list):
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            if (made := plain(item)) is not item:  # some mappings cannot be changed
                value[key] = made
    elif hasattr(type(value), "state_dict"):
        return value.state_dict()
    return value
