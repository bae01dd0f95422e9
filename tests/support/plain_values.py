"""Plain data and trees as Python values, written from docs/format.md alone, for tests/support/plain_reader.py."""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import types
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

FACTORIES = {"list": list, "dict": dict, "int": int, "set": set, "float": float, "str": str, "tuple": tuple}


def decode(raw: bytes, part: Callable[[int, int], bytes]) -> Any:
    """Read plain data; part gives the buffer of a number and a length. A tag that is not known gives a tuple."""

    def value(item: Any) -> Any:
        if not isinstance(item, list):
            return item
        tag, rest = item[0], [value(each) for each in item[1:]]
        return VALUES[tag](*rest) if tag in VALUES else part(*rest) if tag == "part" else (tag, *rest)

    return value(msgspec.msgpack.decode(raw))


def _pairs(*flat: Any) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _ordered(*children: Any) -> OrderedDict[Any, Any]:
    head = len(children) % 2
    made = OrderedDict(_pairs(*children[head:]))
    if head:
        made._metadata = children[0]  # type: ignore[attr-defined]
    return made


def _named(made: Any, *flat: Any) -> Any:
    vars(made).update(_pairs(*flat))
    return made


def _bytes_io(raw: bytes, position: int) -> io.BytesIO:
    made = io.BytesIO(raw)
    made.seek(position)
    return made


def _in_zone(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: kind(*numbers[:-2], numbers[-1]).replace(fold=numbers[-2])


def _dtype(form: Any) -> np.dtype[Any]:
    made: np.dtype[Any]
    if isinstance(form, str):
        made = np.dtype(form)
    elif form[0] == "long" and form[2] == np.finfo(np.longdouble).nmant:
        made = np.dtype(form[1])
    elif form[0] == "array":
        made = np.dtype((_dtype(form[1]), form[2:]))
    elif form[0] == "fields":
        _, size, aligned, *fields = form
        names, dtypes, offsets = zip(*fields, strict=True)
        whole: Any = {"names": names, "formats": [*map(_dtype, dtypes)], "offsets": offsets, "itemsize": size}
        made = np.dtype(whole, align=aligned)
    else:
        message = f"the dtype {form}"
        raise ValueError(message)
    return made


def _bits(state: dict[str, Any], seed: dict[str, Any] | None) -> Any:
    if state["bit_generator"] not in {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}:
        message = "a generator of another kind"
        raise ValueError(message)
    made = getattr(np.random, state["bit_generator"])(np.random.SeedSequence(**seed) if seed else 0)
    made.state = state
    return made


def _random_state(state: dict[str, Any]) -> np.random.RandomState:
    made = np.random.RandomState()
    made.set_state(state)
    return made


VALUES: dict[str, Callable[..., Any]] = {
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "dict": _pairs,
    "Counter": lambda *flat: Counter(_pairs(*flat)),
    "OrderedDict": _ordered,
    "defaultdict": lambda name, *flat: defaultdict(FACTORIES.get(name), _pairs(*flat)),
    "deque": lambda length, *items: deque(items, length),
    "SimpleNamespace": lambda *flat: _named(types.SimpleNamespace(), *flat),
    "Namespace": lambda *flat: _named(argparse.Namespace(), *flat),
    "slice": slice,
    "range": range,
    "complex": complex,
    "int": lambda raw: int.from_bytes(raw, "little", signed=True),
    "str": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "bytearray": bytearray,
    "BytesIO": _bytes_io,
    "path": lambda kind, text: getattr(pathlib, kind)(text),
    "date": datetime.date,
    "timedelta": datetime.timedelta,
    "time": _in_zone(datetime.time),
    "datetime": _in_zone(datetime.datetime),
    "timezone": lambda offset, name: datetime.timezone(offset, *([] if name is None else [name])),
    "zoneinfo": zoneinfo.ZoneInfo,
    "numpy.ndarray": lambda dtype, shape, raw: np.frombuffer(raw, _dtype(dtype)).reshape(shape),
    "numpy.scalar": lambda dtype, raw: np.frombuffer(raw, _dtype(dtype))[0],
    "numpy.str": np.str_,
    "numpy.BitGenerator": _bits,
    "numpy.Generator": lambda *two: np.random.Generator(_bits(*two)),
    "numpy.RandomState": _random_state,
    "numpy.bytes": np.bytes_,
}


def nest(node: Any, leaves: list[dict[str, Any]], path: tuple[str, ...]) -> Any:
    """Make the nested state of a tree; leaves are the tensors and the objects by flat key."""
    if not isinstance(node, list):
        return leaves[node][".".join(path)]
    kind, extra, *flat = node
    pairs = {key: nest(child, leaves, (*path, str(key))) for key, child in zip(flat[::2], flat[1::2], strict=True)}
    if kind in {"list", "tuple"}:
        return list(pairs.values()) if kind == "list" else tuple(pairs.values())
    empty: Any = decode(extra, lambda *_: b"") if extra else None
    if kind == "defaultdict":
        empty.update(pairs)
        return empty
    return pairs if kind == "dict" else _ordered(*([empty] if extra else []), *chain(*pairs.items()))
