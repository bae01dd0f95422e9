"""Exact comparison of plain values by type, order and bits. `==` returns True for 1 and 1.0."""

from __future__ import annotations

import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


def same(one: Any, other: Any) -> bool:
    """Report whether two values agree in type, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype) and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if type(one) is float:
        return struct.pack("<d", one) == struct.pack("<d", other)
    if type(one) is complex:
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, np.random.Generator):
        return same(one.bit_generator.state, other.bit_generator.state)
    return _same_container(one, other)


def _same_container(one: Any, other: Any) -> bool:
    if type(one) in _MAPPINGS:
        factories = [getattr(value, "default_factory", None) for value in (one, other)]
        attributes = [list(getattr(value, "__dict__", {}).items()) for value in (one, other)]
        return factories[0] is factories[1] and same(*attributes) and _same_items(one, other)
    if isinstance(one, SimpleNamespace | Namespace):
        return same(vars(one), vars(other))
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and _same_all(list(one), list(other))
    if isinstance(one, list | tuple):
        return _same_all(one, other)
    if isinstance(one, slice):
        return _same_all((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, set | frozenset):
        rest = list(other)
        return len(one) == len(other) and all(_take(item, rest) for item in one)
    return bool(one == other) and repr(one) == repr(other)


def _same_items(one: Any, other: Any) -> bool:
    return _same_all([part for item in one.items() for part in item], [part for item in other.items() for part in item])


def _same_all(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def _take(item: Any, rest: list[Any]) -> bool:
    for index, other in enumerate(rest):
        if same(item, other):
            del rest[index]
            return True
    return False


def bits_of_nan() -> list[float]:
    """Return the bits of floats for which == returns the wrong result."""
    quiet = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]
    return [math.nan, -math.nan, quiet, math.inf, -math.inf, -0.0, 0.0]
