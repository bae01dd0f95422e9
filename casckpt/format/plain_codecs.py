"""Codecs that convert standard library types to plain children and back.

Each `Codec` handles the values of one tag. ``split`` returns children that are plain data. ``join`` receives children
that were decoded from untrusted bytes. It checks their types first, and raises one of `JOIN_ERRORS` if they do not
match. Types are compared exactly, because a subclass may hold more data than its base class.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from io import BytesIO
from itertools import chain
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import NoneType, SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

JOIN_ERRORS = (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError)
"""The errors that a join, or a constructor that it calls, raises for invalid children."""


class Unfit(Exception):
    """A value is not plain data. ``what`` describes it. ``hint`` says what to store instead."""

    def __init__(self, what: str, hint: str = "store the values that it consists of") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Buffer:
    """A child that consists of raw bytes, not yet copied. It is decoded as bytes.

    ``view``: a view of contiguous one-byte items.
    """

    view: memoryview


@dataclass(frozen=True, slots=True)
class Codec:
    """One kind of value. ``step(value, index)`` formats the position of child ``index`` in it, for error messages."""

    tag: str
    types: tuple[type, ...]
    split: Callable[[Any], Iterable[Any]]
    join: Callable[[list[Any]], Any]
    step: Callable[[Any, int], str] = lambda value, index: ""
    unordered: bool = False


def expect(children: Sequence[Any], *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the children if their types are ``kinds``, in this order. Otherwise, raise TypeError."""
    if len(children) != len(kinds):
        raise TypeError(f"it has {len(children)} parts instead of {len(kinds)}")
    for child, kind in zip(children, kinds, strict=True):
        if type(child) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise TypeError(f"a part has the wrong type {type(child).__name__}")
    return list(children)


# containers


def show_key(key: object) -> str:
    """Format a dict key as a short string."""
    text = repr(key) if isinstance(key, str | int | float | NoneType) else f"<{type(key).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _pairs(mapping: dict[Any, Any]) -> list[Any]:
    return list(chain.from_iterable(mapping.items()))


def _mapping(children: Sequence[Any]) -> dict[Any, Any]:
    if len(children) % 2:
        raise ValueError("a key is missing its value")
    mapping = dict(zip(children[::2], children[1::2], strict=True))
    if 2 * len(mapping) != len(children):
        raise ValueError("it contains a duplicate key")
    return mapping


def _text_mapping(children: Sequence[Any]) -> dict[str, Any]:
    mapping = _mapping(children)
    if any(type(name) is not str for name in mapping):
        raise TypeError("an attribute's name is not a string")
    return mapping


def _index_step(value: Any, index: int) -> str:
    return f"[{index}]"


def _key_step(mapping: Any, index: int) -> str:
    key = show_key(list(mapping)[index // 2])
    return f"[{key}]" if index % 2 else f" (its key {key})"


def _ordered_step(mapping: Any, index: int) -> str:
    return _key_step(mapping, index - 1) if index else "._metadata"


def _attribute_step(value: Any, index: int) -> str:
    return f".{list(vars(value))[index // 2]}"


def _split_ordered(value: OrderedDict[Any, Any]) -> list[Any]:
    extra = set(vars(value)) - {"_metadata"}
    if extra:
        raise Unfit(f"an OrderedDict with attributes ({sorted(extra)})", "remove the attributes")
    return [vars(value).get("_metadata"), *_pairs(value)]


def _join_ordered(children: list[Any]) -> OrderedDict[Any, Any]:
    joined = OrderedDict(_mapping(children[1:]))
    if children[0] is not None:
        vars(joined)["_metadata"] = children[0]
    return joined


_FACTORIES: dict[str, Callable[[], Any] | None] = {
    **{kind.__name__: kind for kind in (list, dict, int, set, float, str, tuple)},
    "None": None,
}


def _split_default(value: defaultdict[Any, Any]) -> list[Any]:
    names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
    if not names:
        raise Unfit(f"a defaultdict whose factory is not one of {', '.join(_FACTORIES)}", "store it as a dict")
    return [names[0], *_pairs(value)]


def _join_default(children: list[Any]) -> defaultdict[Any, Any]:
    (name,) = expect(children[:1], str)
    return defaultdict(_FACTORIES[name], _mapping(children[1:]))


def _join_deque(children: list[Any]) -> deque[Any]:
    (maxlen,) = expect(children[:1], (int, NoneType))
    joined = deque(children[1:], maxlen)
    if len(joined) != len(children) - 1:
        raise ValueError("it is longer than its maxlen")
    return joined


def _set_of(kind: type) -> Callable[[list[Any]], Any]:
    def join(children: list[Any]) -> Any:
        found = kind(children)
        if len(found) != len(children):
            raise ValueError("it contains an item twice")
        return found

    return join


def _join_namespace(children: list[Any]) -> argparse.Namespace:
    joined = argparse.Namespace()
    vars(joined).update(_text_mapping(children))
    return joined


CONTAINERS = (
    Codec("list", (list,), list, list, _index_step),
    Codec("tuple", (tuple,), list, tuple, _index_step),
    Codec("dict", (dict,), _pairs, _mapping, _key_step),
    Codec("OrderedDict", (OrderedDict,), _split_ordered, _join_ordered, _ordered_step),
    Codec("Counter", (Counter,), _pairs, lambda children: Counter(_mapping(children)), _key_step),
    Codec("defaultdict", (defaultdict,), _split_default, _join_default, lambda d, index: _key_step(d, index - 1)),
    Codec("deque", (deque,), lambda d: [d.maxlen, *d], _join_deque, lambda _, index: f"[{index - 1}]"),
    Codec("set", (set,), list, _set_of(set), unordered=True),
    Codec("frozenset", (frozenset,), list, _set_of(frozenset), unordered=True),
    Codec(
        "SimpleNamespace",
        (SimpleNamespace,),
        lambda value: _pairs(vars(value)),
        lambda children: SimpleNamespace(**_text_mapping(children)),
        _attribute_step,
    ),
    Codec("Namespace", (argparse.Namespace,), lambda value: _pairs(vars(value)), _join_namespace, _attribute_step),
    Codec("slice", (slice,), lambda s: [s.start, s.stop, s.step], lambda children: slice(*_three(children))),
)


def _three(children: list[Any]) -> list[Any]:
    if len(children) != 3:
        raise ValueError("it does not have three parts")
    return children


# numbers, strings, bytes


def int_bytes(value: int) -> bytes:
    """Encode an int of any size: two's complement, little-endian."""
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _split_stream(stream: BytesIO) -> list[Any]:
    if stream.closed:
        raise Unfit("a closed BytesIO", "store its bytes, as bytes")
    return [Buffer(memoryview(stream.getvalue())), stream.tell()]


def _join_stream(children: list[Any]) -> BytesIO:
    data, position = expect(children, bytes, int)
    if not 0 <= position < 2**63:
        raise ValueError("its position is invalid")
    stream = BytesIO(data)
    stream.seek(position)
    return stream


NUMBERS = (
    # of no type: the encoder itself splits int and str, and only values that msgpack cannot represent
    Codec("int", (), list, lambda c: int.from_bytes(expect(c, bytes)[0], "little", signed=True)),
    Codec("str", (), list, lambda c: str(expect(c, bytes)[0], "utf-8", "surrogatepass")),
    Codec(
        "bytearray", (bytearray,), lambda value: [Buffer(memoryview(value))], lambda c: bytearray(expect(c, bytes)[0])
    ),
    Codec("BytesIO", (BytesIO,), _split_stream, _join_stream),
    Codec("complex", (complex,), lambda z: [z.real, z.imag], lambda c: complex(*expect(c, float, float))),
    Codec("range", (range,), lambda r: [r.start, r.stop, r.step], lambda c: range(*expect(c, int, int, int))),
)


# paths and times

_PATHS: dict[str, type[PurePath]] = {
    kind.__name__: kind for kind in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
}
_PURE: dict[str, type[PurePath]] = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}


def _join_path(children: list[Any]) -> PurePath:
    name, text = expect(children, str, str)
    try:
        return _PATHS[name](text)
    except NotImplementedError:  # a file path of a different operating system, which cannot be opened here
        return _PURE[name](text)


def _split_timezone(zone: timezone) -> list[Any]:
    offset, name = zone.utcoffset(None), zone.tzname(None)
    return [offset, None if name == timezone(offset).tzname(None) else name]


def _join_timezone(children: list[Any]) -> timezone:
    offset, name = expect(children, timedelta, (str, NoneType))
    return timezone(offset) if name is None else timezone(offset, name)


def _split_zone(zone: ZoneInfo) -> list[Any]:
    if zone.key is None:
        raise Unfit("a ZoneInfo without a key", "use ZoneInfo(key)")
    return [zone.key]


def _join_zone(children: list[Any]) -> ZoneInfo:
    (key,) = expect(children, str)
    if not re.fullmatch(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,3}", key):
        raise ValueError("the name of a time zone is invalid")
    try:
        return ZoneInfo(key)
    except (ZoneInfoNotFoundError, OSError) as error:
        raise ValueError(f"this machine does not know the time zone {key}; install tzdata") from error


_ZONES = (timezone, ZoneInfo, NoneType)


def _zone_of(value: time | datetime) -> Any:
    if type(value.tzinfo) not in _ZONES:
        kind = f"{type(value.tzinfo).__module__}.{type(value.tzinfo).__qualname__}"
        raise Unfit(f"a time whose tzinfo is a {kind}", "use datetime.timezone or zoneinfo.ZoneInfo")
    return value.tzinfo


def _split_time(t: time) -> list[Any]:
    return [t.hour, t.minute, t.second, t.microsecond, t.fold, _zone_of(t)]


def _join_time(children: list[Any]) -> time:
    hour, minute, second, micro, fold, zone = expect(children, int, int, int, int, int, _ZONES)
    return time(hour, minute, second, micro, zone, fold=fold)


def _split_datetime(t: datetime) -> list[Any]:
    return [t.year, t.month, t.day, t.hour, t.minute, t.second, t.microsecond, t.fold, _zone_of(t)]


def _join_datetime(children: list[Any]) -> datetime:
    year, month, day, hour, minute, second, micro, fold, zone = expect(children, *[int] * 8, _ZONES)
    return datetime(year, month, day, hour, minute, second, micro, zone, fold=fold)


TIMES = (
    Codec("path", tuple(_PATHS.values()), lambda path: [type(path).__name__, str(path)], _join_path),
    Codec("date", (date,), lambda d: [d.year, d.month, d.day], lambda c: date(*expect(c, int, int, int))),
    Codec("time", (time,), _split_time, _join_time),
    Codec("datetime", (datetime,), _split_datetime, _join_datetime),
    Codec(
        "timedelta",
        (timedelta,),
        lambda delta: [delta.days, delta.seconds, delta.microseconds],
        lambda children: timedelta(*expect(children, int, int, int)),
    ),
    Codec("timezone", (timezone,), _split_timezone, _join_timezone),
    Codec("zoneinfo", (ZoneInfo,), _split_zone, _join_zone),
)

STANDARD = (*CONTAINERS, *NUMBERS, *TIMES)
