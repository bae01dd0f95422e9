"""Checks the arguments of a load that select keys, names and a device. The errors say what to pass instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from casckpt.errors import InvalidInput, MissingKey

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Rename: TypeAlias = Callable[[str], str] | Mapping[str, str] | None
FullMatch: TypeAlias = "Callable[[re.Pattern[str], str], re.Match[str] | None]"


@dataclass(frozen=True)
class Renaming:
    """A function of a key, which a front end passes as ``rename``.

    ``given``: the argument that the user passed to the front end, for messages.
    """

    function: Callable[[str], str]
    given: Rename

    def __call__(self, key: str) -> str:
        """Return the checkpoint key."""
        return self.function(key)


def usable_device(device: str | torch.device) -> torch.device:
    """Return ``device`` as a `torch.device`. Raises InvalidInput if torch does not know it."""
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device={device!r} is not valid: pass a device such as 'cpu' or 'cuda:0'") from error


def usable_patterns(keys: Any, name: str = "keys") -> Sequence[str] | None:
    """Return fnmatch patterns as a list. None means all keys. A string is a single pattern. Raises InvalidInput."""
    if keys is None:
        return None
    patterns = [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, Iterable) else [keys]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidInput(f"{name}={keys!r:.80} is not valid: pass a list of patterns, such as ['model.*']")
    return patterns


def matches(key: str, patterns: Sequence[str] | None) -> bool:
    """Return whether a key matches one of the patterns. None matches every key."""
    return patterns is None or any(fnmatchcase(key, pattern) for pattern in patterns)


def check_used(patterns: Sequence[str] | None, names: Collection[str], where: str) -> None:
    """Raise MissingKey for a pattern that does not match any of the ``names`` in the checkpoint ``where``."""
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MissingKey(
                f"nothing in {where} matches {pattern!r}; `casckpt show --tensors` lists its keys", keys=(pattern,)
            )


def renamer(rename: Any, fullmatch: FullMatch = re.Pattern.fullmatch) -> Callable[[str], str]:
    """Return a function that maps template keys to checkpoint keys.

    Both this call and the returned function can raise InvalidInput.
    """
    if rename is None:
        return lambda key: key
    if callable(rename):
        return partial(_called, rename)
    if not isinstance(rename, Mapping):
        kind = type(rename).__name__
        raise InvalidInput(f"rename is a {kind}: pass a function of a key, or a dict of regular expressions")
    rules = compiled(rename, "rename: ")

    def apply(key: str) -> str:
        rule = first_match(rules, key, fullmatch)
        return key if rule is None else expanded(*rule, "rename: ")

    return apply


def _called(rename: Callable[[str], Any], key: str) -> str:
    name = rename(key)
    if not isinstance(name, str):
        raise InvalidInput(f"rename returns {name!r:.80} for {key!r}; it must return a key of the checkpoint", key=key)
    return name


def compiled(rules: Mapping[str, T], where: str = "") -> list[tuple[re.Pattern[str], T]]:
    """Compile the regular expressions of ``rules``. The message of an InvalidInput begins with ``where``."""
    return [(_compiled(pattern, where), value) for pattern, value in rules.items()]


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise InvalidInput(f"{where}{pattern!r:.80} is not a regular expression: {error}") from error


def first_match(
    rules: Iterable[tuple[re.Pattern[str], T]], name: str, fullmatch: FullMatch
) -> tuple[re.Match[str], T] | None:
    """Return the match of the first rule that matches ``name`` in full, and the rule's value."""
    for pattern, value in rules:
        match = fullmatch(pattern, name)
        if match:
            return match, value
    return None


def expanded(match: re.Match[str], replacement: str, where: str = "") -> str:
    """Return the replacement for a match. The message of an InvalidInput begins with ``where``."""
    try:
        return match.expand(replacement)
    except (re.error, IndexError, TypeError) as error:
        pattern = match.re.pattern
        raise InvalidInput(f"{where}{replacement!r:.80} is not a replacement for {pattern!r:.80}: {error}") from error
