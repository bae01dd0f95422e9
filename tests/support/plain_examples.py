"""Plain values of every type, including some that are easy to encode incorrectly."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import math
import os
import pathlib
import random
import types
import zoneinfo
from typing import Any

import numpy as np

from tests.support.exact import bits_of_nan


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def with_metadata() -> collections.OrderedDict[str, Any]:
    found = collections.OrderedDict([("b", 1), ("a", 2)])
    vars(found)["_metadata"] = collections.OrderedDict({"": {"version": 1}, "layer": {"version": 2}})
    return found


def namespace_with_self() -> argparse.Namespace:
    found = argparse.Namespace()
    vars(found)["self"] = 3
    return found


def big_endian() -> np.ndarray[Any, Any]:
    return np.array([1.5, -2.0, math.nan], ">f8")


EXAMPLES: list[Any] = [
    None,
    True,
    0,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    3**2000,
    -(3**2000),
    *bits_of_nan(),
    complex(-0.0, math.nan),
    "",
    "été 🜁",
    "a lone surrogate \udcff and \ud800",
    b"",
    bytes(range(256)),
    bytearray(b"abc"),
    [],
    (),
    {},
    set(),
    frozenset(),
    [[], (), {}, [()]],
    {True: "bool", 2: "int", "2": "str", 2.5: "float", None: "none", (1, (None, "x")): "tuple"},
    {1: "int"},
    {True: "bool"},
    {1.0: "float"},
    {-0.0: 1},
    {"z": 1, "a": 2, "m": {"y": 0, "b": 0}},
    {1, "1", (1, 2), frozenset({3}), None, 2.5, b"x"},
    frozenset({True, "a"}),
    with_metadata(),
    collections.OrderedDict(),
    collections.Counter("hello"),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {"a": 1}),
    *(collections.defaultdict(kind) for kind in (dict, int, set, float, str, tuple)),
    collections.deque([1, 2, 3]),
    collections.deque([1, 2], maxlen=2),
    collections.deque(maxlen=0),
    range(10),
    range(5, -(10**30), -3),
    slice(None),
    slice(1, 2**70, -1),
    types.SimpleNamespace(a=1, b=types.SimpleNamespace()),
    argparse.Namespace(lr=0.1, names=["x"]),
    namespace_with_self(),
    pathlib.PurePosixPath("/a/../b"),
    pathlib.PureWindowsPath(r"c:\x\y"),
    pathlib.Path("relative/file"),
    pathlib.Path(os.fsdecode(b"caf\xe9")),
    pathlib.Path(),
    dt.date(1, 1, 1),
    dt.datetime(2024, 2, 29, 23, 59, 59, 999999),  # noqa: DTZ001 - naive ones are kept too
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime.max.replace(tzinfo=dt.UTC),
    dt.time(1, 2, 3, 4, tzinfo=dt.timezone(dt.timedelta(hours=-3, microseconds=7))),
    dt.time(fold=1),
    dt.timedelta.min,
    dt.timedelta(microseconds=-1),
    dt.UTC,
    dt.timezone(dt.timedelta(hours=1), "CET"),
    zoneinfo.ZoneInfo("UTC"),
    random.Random(4).getstate(),
    np.random.RandomState(4).get_state(),
    np.arange(6).reshape(2, 3),
    np.array(5),
    np.zeros((0, 3), np.int8),
    np.zeros((3, 0)),
    np.array(["a", "bcd", ""]),
    np.array([b"a", b"\0b"]),
    np.array(["2020-01-01", "NaT"], "M8[25s]"),
    np.array([1, 2], "m8[ns]"),
    np.array([True, False]),
    big_endian(),
    np.array([1, 2], ">i2"),
    np.array(["x"], ">U3"),
    np.array([1 / 3], np.longdouble),
    np.zeros(2, np.clongdouble),
    np.array([(1, 2.5, b"x")], [("a", "<i4"), ("b", ">f8"), ("c", "S3")]),
    np.zeros(2, np.dtype({"names": ["b", "a"], "formats": ["<i4", "<f8"], "offsets": [8, 16], "itemsize": 40})),
    np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.zeros(2, [("a", "<i4"), ("b", "<f8")])[["b", "a"]],
    np.zeros(2, [("a", np.longdouble, (2,))]),
    np.zeros(3, [("outer", [("inner", "<i2", (2, 3))]), ("é", "?")]),
    np.zeros(2, "V5"),
    np.float64(-0.0),
    np.float32(math.nan),
    np.float16(1.5),
    np.int64(3),
    np.uint8(200),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.longdouble(1) / 3,
    np.str_("text"),
    np.str_(""),
    np.bytes_(b"a"),
    np.datetime64("NaT"),
    np.datetime64("2020-01-01T00:00", "m"),
    np.timedelta64(3, "D"),
    np.array([(1, 2.5)], [("a", "<i4"), ("b", ">f8")])[0],
]
