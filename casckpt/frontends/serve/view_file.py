"""A file that says how a checkpoint is to be seen: rules of a view, as JSON. It may travel along with a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import KeysView, Mapping
from dataclasses import replace
from typing import Any, Final

from casckpt.errors import InvalidInput
from casckpt.frontends.serve.bounded import BoundedMatch
from casckpt.frontends.views.view import Rules

VIEW_FILE: Final = "casckpt.view.json"
_MAX_BYTES = 1 << 20
_FIELDS: Final[Mapping[str, Any]] = {
    "keys": list,
    "strip_prefix": str,
    "rename": dict,
    "model": bool,
    "split": dict,
    "concat": dict,
}


def read_rules(text: bytes, where: str, *, travels: bool = False) -> Rules:
    """The rules that a file has. Raises InvalidInput, naming ``where`` it comes from, for what is none.

    ``travels``: it came with a checkpoint, whoever wrote that, so its expressions are matched in `BoundedMatch`.

    ``keys``, ``strip_prefix``, ``rename``, ``model``, ``split``, ``concat``: as in
    `casckpt.frontends.views.view.Rules`. ``model`` is true where it is not said.
    """
    try:
        found = json.loads(text) if len(text) <= _MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON ({error}); write an object with some of {_names()}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{where} is no view; write a JSON object with some of {_names()}")
    for name, value in found.items():
        _check(where, name, value)
    rules = Rules(**{"model": True, **found})
    return replace(rules, fullmatch=_bounded(where, found)) if travels else rules


def _bounded(where: str, found: Mapping[str, Any]) -> BoundedMatch:
    maps = [found.get(name, {}) for name in ("rename", "split", "concat")]
    names = (name for one in maps for to in one.values() for name in ([to] if isinstance(to, str) else to))
    return BoundedMatch(where, {pattern for one in maps for pattern in one}, names)


def _check(where: str, name: str, value: Any) -> None:
    kind = _FIELDS.get(name)
    if kind is None:
        raise InvalidInput(f"{where} has {name!r:.80}, which no view knows; there are {_names()}")
    if type(value) is not kind or not all(map(_is_text, value if kind is list else ())):
        raise InvalidInput(f"{where}: {name} is {value!r:.80}; see docs/serving.md for what it may be")
    for pattern in value if kind is dict else ():
        _check_pattern(where, pattern)
    if name == "rename" and not all(map(_is_text, value.values())):
        raise InvalidInput(f"{where}: rename maps a regular expression to a name, both text")
    if name == "split" and not all(map(_are_shares, value.values())):
        raise InvalidInput(f"{where}: split maps a regular expression to names, or to an object of names and shares")
    if name == "concat" and not all(map(_are_names, value.values())):
        raise InvalidInput(f"{where}: concat maps a regular expression to the name of the whole, and those that follow")


def _check_pattern(where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidInput(f"{where}: {pattern!r:.80} is no regular expression: {error}") from error


def _are_shares(value: object) -> bool:
    return _are_names(value.keys() if isinstance(value, dict) and all(map(_is_count, value.values())) else value)


def _are_names(value: object) -> bool:
    return isinstance(value, list | KeysView) and bool(value) and all(map(_is_text, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _names() -> str:
    return ", ".join(_FIELDS)
