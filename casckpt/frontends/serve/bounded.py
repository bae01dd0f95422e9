"""Regular expressions that somebody else wrote, matched in bounded time: one that tries too much is refused.

A match of Python's `re` lets nothing else run, and a few letters can keep it busy for years. So a view that travels
with a checkpoint may use a part of the language in which it can be told how many ways there are to match a name: groups
do not repeat, and nothing looks ahead or back. All matches of one checkpoint share a limit of time, asked in between.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from math import comb
from typing import Final, NamedTuple

from casckpt.errors import InvalidInput

_MOST_WAYS: Final = 4_000_000  # of one match; a quarter of a second
_MOST_SECONDS: Final = 10.0  # of this thread, for all names of a checkpoint
_MOST_CHARACTERS: Final = 1000
_MOST_ESCAPES: Final = 20  # of a replacement: each may stand for all of a name
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
    """How many ways there may be: ``repeats`` that share the letters of a name, times ``choices``."""

    repeats: int
    choices: int

    def of(self, name: str) -> int:
        """No match with ``name`` tries more than so many."""
        return comb(len(name) + self.repeats, self.repeats) * self.choices


def ways(pattern: str) -> Ways:
    """Tell how many ways an expression may try. Raises InvalidInput for one whose ways cannot be told.

    It is one that `re` compiles.
    """
    if len(pattern) > _MOST_CHARACTERS:
        raise InvalidInput(f"{pattern[:20]!r}... has more than {_MOST_CHARACTERS} characters")
    repeats, choices, at, bars = 0, 1, 0, [0]
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        if found is None:
            raise InvalidInput(
                f"{pattern!r:.80} has {pattern[at : at + 8]!r}; there may be letters, '.', \\d, [...], (...) and |, "
                "and *, +, ? and {n} behind single ones"
            )
        repeats += found["repeat"] not in (None, "?")
        choices *= 2 if found["repeat"] == "?" or found["maybe"] else 1
        if found["open"]:
            bars.append(0)
        elif found["close"]:
            choices *= bars.pop() + 1
        elif found["bar"]:
            bars[-1] += 1
        at = found.end()
    return Ways(repeats, choices * (bars[0] + 1))


class BoundedMatch:
    """Called as `re.fullmatch`, with expressions of a checkpoint that ``where`` names. Used by one thread."""

    def __init__(self, where: str, patterns: Collection[str], replacements: Iterable[str]) -> None:
        """Raises InvalidInput, naming ``where``, for an expression whose ways cannot be told, or too long names."""
        try:
            self._ways = {pattern: ways(pattern) for pattern in patterns}
        except InvalidInput as error:
            raise _refused(where, str(error)) from error
        for one in replacements:
            if len(one) > _MOST_CHARACTERS or one.count("\\") > _MOST_ESCAPES:
                raise _refused(where, f"{one!r:.80} is too long a name")
        self._where = where
        self._until = time.thread_time() + _MOST_SECONDS

    def __call__(self, pattern: re.Pattern[str], name: str) -> re.Match[str] | None:
        """Match all of a name. Raises InvalidInput where that may take too long."""
        if self._ways[pattern.pattern].of(name) > _MOST_WAYS:
            raise _refused(self._where, f"{pattern.pattern!r:.80} may match {name!r:.80} in too many ways")
        if time.thread_time() > self._until:
            raise _refused(self._where, f"its expressions take more than {_MOST_SECONDS:.0f} s")
        return pattern.fullmatch(name)


def _refused(where: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{where} travels with the checkpoint, and is not used: {why}. Write it more simply, or start casckpt serve "
        "with --view FILE, which may be anything"
    )
