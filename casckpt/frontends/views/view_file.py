"""View rules and names in JSON files, which may be attached to a checkpoint."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from dataclasses import replace
from math import comb
from typing import Any, Final, NamedTuple

from casckpt.base.names import is_attachment_name
from casckpt.errors import InvalidInput
from casckpt.frontends.views.view import Rules
from casckpt.loading.options import compiled

_MOST_WAYS: Final = 4_000_000  # per match, which takes a quarter of a second
_MOST_SECONDS: Final = 10.0  # CPU time for all names of a checkpoint
_MOST_CHARACTERS: Final = 1000
_MOST_VIEWS: Final = 100
_MOST_ESCAPES: Final = 20  # per replacement, because each escape may expand to a whole name
_TOKEN: Final = re.compile(
    r"""
    (?P<atom> [^\\\[\](){}|*+?^$] | \\[dDsSwW] | \\[^0-9A-Za-z] | \[\^?+\]?+(?:[^\]\\\[]|\\.)*+\] )
      (?: (?P<repeat> [*+] | \{[0-9]{0,4},?[0-9]{0,4}\} | \? ) \?? (?![*+?{]) )?
    | (?P<open> \( (?: \?: | \?P<[a-z_]+> )? (?!\?) )
    | (?P<close> \) ) (?P<maybe> \??(?![*+?{]) )
    | (?P<bar> \| )
    | [$^] (?![*+?{])
    """,
    re.VERBOSE | re.DOTALL,
)


class Ways(NamedTuple):
    """A bound on the attempts of a match: the number of ways to split a name among ``repeats``, times ``choices``."""

    repeats: int
    choices: int

    def of(self, name: str) -> int:
        """Return the maximum number of attempts to match ``name``."""
        return comb(len(name) + self.repeats, self.repeats) * self.choices


def ways(pattern: str) -> Ways:
    """Compute a bound on the attempts of an expression that `re` compiles.

    Raises InvalidInput if there is no bound.
    """
    if len(pattern) > _MOST_CHARACTERS:
        raise InvalidInput(f"{pattern[:20]!r}... is longer than {_MOST_CHARACTERS} characters")
    repeats, choices, at, bars = 0, 1, 0, [0]
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise InvalidInput(
                f"{pattern!r:.80} contains {pattern[at : at + 8]!r}; only letters, '.', \\d, [...], (...) and | are "
                "allowed, and *, +, ? and {n} after a single character or class"
            )
        repeats += token["repeat"] not in (None, "?")
        choices *= 2 if token["repeat"] == "?" or token["maybe"] else 1
        if token["open"]:
            bars.append(0)
        elif token["close"]:
            choices *= bars.pop() + 1
        elif token["bar"]:
            bars[-1] += 1
        at = token.end()
    return Ways(repeats, choices * (bars[0] + 1))


class BoundedMatch:
    """`re.fullmatch` in bounded time, for patterns from an untrusted source. It is not thread-safe.

    A match of `re` blocks the interpreter, and a short pattern can run for years. Therefore, a view that is attached
    to a checkpoint may use only patterns with a known number of possible matches. Such patterns do not repeat groups
    and do not use lookahead or lookbehind. All matches for one checkpoint share a time limit. ``where``: the name of
    the checkpoint for error messages.
    """

    def __init__(self, where: str, patterns: Collection[str], replacements: Iterable[str]) -> None:
        """Check the patterns and replacements.

        Raises InvalidInput for an unbounded expression or a name that is too long.
        """
        try:
            self._ways = {pattern: ways(pattern) for pattern in patterns}
        except InvalidInput as error:
            raise _refused(where, str(error)) from error
        for name in replacements:
            if len(name) > _MOST_CHARACTERS or name.count("\\") > _MOST_ESCAPES:
                raise _refused(where, f"the name {name!r:.80} is too long")
        self._where = where
        self._until = time.thread_time() + _MOST_SECONDS

    def __call__(self, pattern: re.Pattern[str], name: str) -> re.Match[str] | None:
        """Match a whole name. Raises InvalidInput if the match could take too long."""
        if self._ways[pattern.pattern].of(name) > _MOST_WAYS:
            raise _refused(self._where, f"{pattern.pattern!r:.80} could match {name!r:.80} in too many ways")
        if time.thread_time() > self._until:
            raise _refused(self._where, f"its expressions take more than {_MOST_SECONDS:.0f} s")
        return pattern.fullmatch(name)


def _refused(where: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{where} was saved with the checkpoint, but casckpt cannot use it: {why}. Simplify it, or start casckpt "
        "serve with --view FILE, to which these limits do not apply. An export with --strip-prefix or --rename does "
        "not use it"
    )


VIEW_FILE: Final = "casckpt.view.json"
MAX_BYTES: Final = 1 << 20


def read_rules(text: bytes, where: str, *, travels: bool = False) -> Rules:
    """Parse the rules in a file. Raises InvalidInput, which names ``where``, for an invalid file.

    ``travels``: whether the file is an attachment. It may then come from an untrusted source, so `BoundedMatch`
    matches its expressions. The file may have these fields of `casckpt.frontends.views.view.Rules`: ``keys``,
    ``strip_prefix``, ``rename``, ``model`` (default: true), ``split`` and ``concat``.
    """
    return _rules(_parsed(text, where), where, travels=travels)


def _parsed(text: bytes, where: str) -> Any:
    try:
        found = json.loads(text) if len(text) <= MAX_BYTES else None
        json.dumps(found, ensure_ascii=False).encode()  # fails for a lone surrogate, which no file can hold
        return found
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON ({error}); write an object with some of {_names()}") from error


def _rules(content: Any, where: str, *, travels: bool) -> Rules:
    if not isinstance(content, dict):
        raise InvalidInput(f"{where} is not a JSON object; write one with some of {_names()}")
    for name, value in content.items():
        _check(where, name, value)
    rules = Rules(**{"model": True, **content})
    return replace(rules, fullmatch=_bounded(where, content)) if travels else rules


class HubView(NamedTuple):
    """One model or adapter in a folder. ``stem``: the path with which the names of its files begin."""

    stem: str
    rules: Rules


class HubNames(NamedTuple):
    """What a model's libraries specify for its files. ``views``: empty if the names are those of the checkpoint.

    ``notes``: messages for the user. ``tied``: pairs of names that the config ties, but that had separate tensors.
    """

    views: tuple[HubView, ...] = ()
    notes: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()


def read_hub_names(text: bytes, where: str) -> HubNames:
    """Parse an attached `HUB_FILE`. Raises InvalidInput, which names ``where``, for an invalid file.

    The file may come from an untrusted source, as with `read_rules`.
    """
    content, kinds = _parsed(text, where), {"views": dict, "notes": list, "tied": dict}
    given = content if isinstance(content, dict) else {"views": content}
    views, notes, tied = parts = [given.get(name, kind()) for name, kind in kinds.items()]
    is_valid = all(map(isinstance, parts, kinds.values())) and all(map(_is_text, (*notes, *tied.values())))
    is_valid = is_valid and len(views) <= _MOST_VIEWS and all(map(is_attachment_name, views))
    if not is_valid or len({stem.rpartition("/")[0] for stem in views}) < len(views):
        raise InvalidInput(f"{where} is not valid; export with --strip-prefix or --rename, which do not use the file")
    found = [HubView(stem, _rules(rules, where, travels=True)) for stem, rules in views.items()]
    return HubNames(tuple(found), tuple(notes), tuple(tied.items()))


def _bounded(where: str, content: Mapping[str, Any]) -> BoundedMatch:
    maps = [content.get(name, {}) for name in ("rename", "split", "concat")]
    names = (name for rules in maps for to in rules.values() for name in ([to] if isinstance(to, str) else to))
    return BoundedMatch(where, {pattern for rules in maps for pattern in rules}, names)


def _check(where: str, name: str, value: Any) -> None:
    if name not in _FIELDS:
        raise InvalidInput(f"{where} has the unknown field {name!r:.80}; the known fields are {_names()}")
    is_valid, rule = _FIELDS[name]
    if not is_valid(value):
        raise InvalidInput(
            f"{where}: {name} is {value!r:.80}, but it must {rule}; docs/serving.md lists the valid values"
        )
    if isinstance(value, dict):
        compiled(value, f"{where}: ")


def _is_map(value: object, is_valid: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_valid, value.values()))


def _are_parts(value: object) -> bool:
    parts = list(value.values()) if isinstance(value, dict) else []
    is_one_kind = all(map(_is_count, parts)) or all(map(_is_index, parts))
    return _are_names(value.keys() if isinstance(value, dict) and is_one_kind else value)


def _is_index(value: object) -> bool:
    return isinstance(value, list) and all(_is_number(one) or _is_range(one) for one in value)


def _is_range(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_names(value: object) -> bool:
    return isinstance(value, list | KeysView) and bool(value) and all(map(_is_text, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "keys": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "be a list of strings"),
    "strip_prefix": (_is_text, "be a string"),
    "rename": (lambda value: _is_map(value, _is_text), "map regular expressions to names, all of them strings"),
    "model": (lambda value: isinstance(value, bool), "be true or false"),
    "split": (
        lambda value: _is_map(value, _are_parts),
        "map a regular expression to names, or to an object with names and shares or indices",
    ),
    "concat": (
        lambda value: _is_map(value, _are_names),
        "map a regular expression to a list: the name of the combined tensor, and the names of those to append to it",
    ),
}
"""For each field, whether a value is valid, and what it must be."""


def _names() -> str:
    return ", ".join(_FIELDS)
