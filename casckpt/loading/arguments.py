"""What a caller gives to say which keys, and where to: checked, with an error that says what to give instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from casckpt.errors import InvalidInput

if TYPE_CHECKING:
    import torch

Rename: TypeAlias = Callable[[str], str] | Mapping[str, str] | None
FullMatch: TypeAlias = "Callable[[re.Pattern[str], str], re.Match[str] | None]"


@dataclass(frozen=True)
class Renaming:
    """A function of a key that a front end passes as ``rename``. ``given``: what it was given itself, for messages."""

    function: Callable[[str], str]
    given: Rename

    def __call__(self, key: str) -> str:
        """Give the key of the checkpoint."""
        return self.function(key)


def usable_device(device: str | torch.device) -> torch.device:
    """A device for new tensors. Raises InvalidInput for what torch does not know."""
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device={device!r} is not usable; give one as 'cpu' or 'cuda:0'") from error


def usable_patterns(keys: Any, name: str = "keys") -> Sequence[str] | None:
    """Fnmatch patterns as a list; None for all keys. One text is one pattern. Raises InvalidInput."""
    if keys is None:
        return None
    patterns = [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, Iterable) else [keys]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidInput(f"{name}={keys!r:.80} is not usable; give a list of patterns, as ['model.*']")
    return patterns


def matches(key: str, patterns: Sequence[str] | None) -> bool:
    """Whether a key matches any of some patterns; None: all do."""
    return patterns is None or any(fnmatchcase(key, pattern) for pattern in patterns)


def renamer(rename: Any, fullmatch: FullMatch = re.Pattern.fullmatch) -> Callable[[str], str]:
    """From a key of the template to one of the checkpoint. Raises InvalidInput, at once or for a key."""
    if rename is None:
        return lambda key: key
    if callable(rename):
        return partial(_called, rename)
    if not isinstance(rename, Mapping):
        kind = type(rename).__name__
        raise InvalidInput(f"rename is a {kind}; give a function of a key, or a dict of regular expressions")
    rules = [(_compiled(pattern), replacement) for pattern, replacement in rename.items()]

    def apply(key: str) -> str:
        for pattern, replacement in rules:
            found = fullmatch(pattern, key)
            if found:
                return _expanded(found, replacement)
        return key

    return apply


def _called(rename: Callable[[str], Any], key: str) -> str:
    name = rename(key)
    if not isinstance(name, str):
        raise InvalidInput(f"rename gives {name!r:.80} for {key!r}; it must give a key of the checkpoint", key=key)
    return name


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidInput(f"rename: {pattern!r:.80} is no regular expression: {error}") from error


def _expanded(found: re.Match[str], replacement: str) -> str:
    try:
        return found.expand(replacement)
    except (re.error, IndexError, TypeError) as error:
        pattern = found.re.pattern
        raise InvalidInput(f"rename: {replacement!r:.80} is no replacement for {pattern!r:.80}: {error}") from error
