"""View rules and names in JSON files, which may be attached to a checkpoint."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import comb
from typing import Final, NamedTuple

from casckpt.base.names import is_attachment_name
from casckpt.errors import InvalidInput
from casckpt.format import views
from casckpt.format.views import ViewFile, decode
from casckpt.frontends.views.view import Rules
from casckpt.loading.options import compiled

_MOST_WAYS: Final = 4_000_000  # per match, which takes a quarter of a second
_MOST_SECONDS: Final = 10.0  # CPU time for all names of a checkpoint
_MOST_CHARACTERS: Final = 1000
_MOST_VIEWS: Final = 100
_MOST_ESCAPES: Final = 20  # per replacement, because each escape may expand to a whole name
_SIMPLE: Final = re.compile(r"([^\\\[\](){}|*+?^$]|\\[^0-9A-Za-z]|\((\.|\\d)[*+]\))*")
r"""An expression of letters, ".", escaped characters, and the groups (.*), (.+), (\d*) and (\d+)."""


class BoundedMatch:
    """`re.fullmatch` in bounded time, for patterns from an untrusted source. It is not thread-safe.

    A match of `re` blocks the interpreter, and a short pattern can run for years. Therefore, a view that is attached
    to a checkpoint may use only simple patterns, for which the number of possible matches of a name is known: the ways
    to split the name among the groups. All matches for one checkpoint share a time limit. ``where``: the name of the
    checkpoint for error messages.
    """

    def __init__(self, where: str, patterns: Iterable[str], replacements: Iterable[str]) -> None:
        """Check the patterns and replacements. Raises InvalidInput."""
        for pattern in patterns:
            if len(pattern) > _MOST_CHARACTERS or not _SIMPLE.fullmatch(pattern):
                raise _refused(
                    where,
                    f"in the expression {pattern!r:.80}, only letters, '.', escaped characters, (.*) and (\\d+) are "
                    f"allowed, and at most {_MOST_CHARACTERS} characters",
                )
        for name in replacements:
            if len(name) > _MOST_CHARACTERS or name.count("\\") > _MOST_ESCAPES:
                raise _refused(where, f"the name {name!r:.80} is too long")
        self._where = where
        self._until = time.thread_time() + _MOST_SECONDS

    def __call__(self, pattern: re.Pattern[str], name: str) -> re.Match[str] | None:
        """Match a whole name. Raises InvalidInput if the match could take too long."""
        if comb(len(name) + pattern.groups, pattern.groups) > _MOST_WAYS:
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


def read_rules(text: bytes, where: str, *, travels: bool = False) -> Rules:
    """Parse the rules in a file. Raises InvalidInput, which names ``where``, for an invalid file.

    ``travels``: whether the file is an attachment. It may then come from an untrusted source, so `BoundedMatch`
    matches its expressions.
    """
    view = decode(text, views.VIEW, where, "docs/serving.md lists the valid fields")
    return _rules(view, where, travels=travels)


def _rules(view: ViewFile, where: str, *, travels: bool) -> Rules:
    rules = Rules(view.keys, view.strip_prefix, view.rename, view.model, view.split, view.concat)
    maps: list[Mapping[str, str | Iterable[str]]] = [view.rename or {}, view.split, view.concat]
    if travels:
        names = (name for one in maps for to in one.values() for name in ([to] if isinstance(to, str) else to))
        rules = replace(rules, fullmatch=BoundedMatch(where, (pattern for one in maps for pattern in one), names))
    for one in maps:
        compiled(one, f"{where}: ")
    return rules


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
    advice = "export with --strip-prefix or --rename, which do not use the file"
    found = decode(text, views.HUB, where, advice)
    folders = {stem.rpartition("/")[0] for stem in found.views}
    if not len(found.views) == len(folders) <= _MOST_VIEWS or not all(map(is_attachment_name, found.views)):
        raise InvalidInput(f"{where} is not valid; {advice}")
    roots = tuple(HubView(stem, _rules(view, where, travels=True)) for stem, view in found.views.items())
    return HubNames(roots, tuple(found.notes), tuple(found.tied.items()))
