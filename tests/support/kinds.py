"""Determines which resources a test needs (ranks, servers, other processes) from the code that it reaches.

`tests.conftest` marks each test with its `kinds_of`. A test without a kind is plain, and `on_its_own` enforces that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import pytest

KINDS: Final = {
    "ranks": "needs processes that make up process groups",
    "server": "something listens: a server of S3, a hostile one, a proxy",
    "process": "starts other processes",
}
FAULT: Final = {"fault": "storage fails, or does something else first, at a chosen call"}
"""A mark that does not count as a kind: such tests are plain."""
_FIXTURES: Final = {"ranks": "ranks", "server": r"\w*_server"}  # requested by an argument or by name
_CALLED: Final = {
    "server": r"Hostile|Proxy|servers|serving|create_server|\w*HTTPServer",
    "process": r"subprocess|multiprocessing|Popen|fork|get_context",
    "fault": "FaultyStore|fail_before|fail_after|call_first|Hostile|Outages",
}
_STARTS: Final = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
_own: list[str] = []  # the plain test that is running


class Words(NamedTuple):
    """The names and strings that code uses."""

    called: frozenset[str]
    said: frozenset[str]


def kinds_of(item: pytest.Item) -> set[str]:
    """Return the kinds of the test, and "fault", of its fixtures, and of all test functions that these reach."""
    if not isinstance(item, pytest.Function):
        return set()
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    fixtures = {*item.fixturenames, *(value for value in given if isinstance(value, str))}
    defined = [one for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
    starts = {one.func for one in defined if one.argname != "_where_stores_lie"}  # in memory by default
    reached = [_reached(start, item.cls) for start in (getattr(item.obj, "__func__", item.obj), *starts)]
    return set[str]().union(*map(_told_by_name, fixtures), *reached)


@cache
def _told_by_name(word: str) -> frozenset[str]:
    return frozenset(kind for kind, told in _FIXTURES.items() if re.fullmatch(told, word))


@cache
def _told_by_call(word: str) -> frozenset[str]:
    return frozenset(kind for kind, told in _CALLED.items() if re.fullmatch(told, word))


@cache
def _reached(start: Any, cls: type | None) -> frozenset[str]:
    """Return the kinds of all functions that ``start`` reaches. ``cls``: the test's class."""
    todo, reached, kinds = _functions(start), set[FunctionType](), set[str]()
    while todo:
        function = todo.pop()
        if function not in reached:
            reached.add(function)
            called, said = _words(function)
            kinds.update(*map(_told_by_name, said), *map(_told_by_call, called))
            todo += _next(function)
            todo += [one for name in called & _members(cls) for one in _functions(getattr(cls, name))]
    return frozenset(kinds)


@cache
def _members(cls: type | None) -> frozenset[str]:
    return frozenset(name for base in (cls.__mro__ if cls else ()) for name in vars(base))


@cache
def _next(function: FunctionType) -> list[FunctionType]:
    """Return the functions in tests/ that ``function`` may call, by name or through a module."""
    called, found = _words(function).called, list[FunctionType]()
    for value in [function.__globals__.get(name) for name in called]:
        inside = [vars(value).get(name) for name in called] if isinstance(value, ModuleType) else [value]
        found += [one for thing in inside for one in _functions(thing)]
    return found


def _functions(thing: Any) -> list[FunctionType]:
    """Return the code of a function if it belongs to the tests."""
    if isinstance(thing, partial):
        return _functions(thing.func)
    if isinstance(thing, property):
        return _functions(thing.fget)
    if not str(getattr(thing, "__module__", "")).startswith("tests."):
        return []
    if isinstance(thing, type):
        return [one for base in thing.__mro__ for member in vars(base).values() for one in _functions(member)]
    inner = unwrap(getattr(getattr(thing, "hypothesis", None), "inner_test", getattr(thing, "__func__", thing)))
    return [inner] if isinstance(inner, FunctionType) else []


@cache
def _words(function: FunctionType) -> Words:
    codes, called, said = [function.__code__], set[str](), set[str]()
    while codes:
        code = codes.pop()
        called |= set(code.co_names)
        said |= {one for one in code.co_consts if isinstance(one, str)}
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return Words(frozenset(called), frozenset(said))


@contextmanager
def on_its_own(item: pytest.Item) -> Iterator[None]:
    """Inside the block, starting a process is an error, because `kinds_of` did not detect it."""
    _own.append(item.nodeid)
    try:
        yield
    finally:
        _own.pop()


def _hook(event: str, _: object) -> None:
    if _own and event in _STARTS:
        raise AssertionError(f"{_own[-1]} counts as plain and starts a process: see tests/support/kinds.py")


sys.addaudithook(_hook)
