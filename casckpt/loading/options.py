"""The arguments of a load: their names and defaults, their checks, and the rules that select and rename keys.

The errors say what to pass instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypedDict, TypeVar, get_args

from casckpt.base.parallel import usable_threads
from casckpt.errors import InvalidInput, MissingKey

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from casckpt.base.progress import Shown
    from casckpt.contents.checkpoint import Checkpoint

T = TypeVar("T")
Rename: TypeAlias = Callable[[str], str] | Mapping[str, str] | None
Unread: TypeAlias = Literal["warn", "ignore"]


class ReadArguments(TypedDict, total=False):
    """The keyword arguments that `Store.read` shares with `Store.load`. See `Store.read`."""

    verify: bool
    allow_pickle: bool
    threads: int | None
    progress: Shown | None


class MatchArguments(TypedDict, total=False):
    """The keyword arguments of `Store.load` that map template keys to checkpoint keys."""

    strict: bool
    ignore_mismatched: Sequence[str] | None
    rename: Rename


class RankArguments(ReadArguments, total=False):
    """The keyword arguments of `Store.read`, and those that specify which ranks make the call together."""

    process_group: ProcessGroup | None
    no_dist: bool


class FillArguments(MatchArguments, total=False):
    """The keyword arguments that `Store.load` and `Store.update` have, but `Store.read` does not."""

    unread: Unread
    cast: bool


class LoadArguments(RankArguments, FillArguments, total=False):
    """The keyword arguments of `Store.load`, which describes them."""


class UpdateArguments(FillArguments, total=False):
    """The keyword arguments of `Store.update`, which describes them."""

    check: bool
    allow_pickle: bool
    process_group: ProcessGroup | None
    no_dist: bool
    threads: int | None
    progress: Shown | None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The arguments of a load or update, with their defaults. Any other argument raises TypeError.

    ``meant``: keys whose unread contents are not logged, because the caller omits or reports them. ``updates``:
    whether this is an update. ``rank``: the number of this rank among the ``ranks`` that load together. ``load_id``:
    a name of this load that is the same on all ranks. ``alive``: called at intervals during the reads.
    """

    strict: bool = True
    ignore_mismatched: Sequence[str] | None = None
    unread: Unread = "warn"
    meant: Sequence[str] = ()
    rename: Rename = None
    cast: bool = False
    updates: bool = False
    held: Checkpoint | None = None
    check: bool = False
    verify: bool = True
    allow_pickle: bool = False
    mapped: bool = False
    process_group: ProcessGroup | None = None
    no_dist: bool = False
    threads: int | None = None
    progress: Shown | None = None
    rank: int = 0
    ranks: int = 1
    ranks_here: int = 1  # the ranks on this host
    sharing: int = 0  # those of them that share reads; 0 if no other rank of the load does
    load_id: str = ""
    alive: Callable[[], None] | None = None
    patience: float = inf  # the most seconds without progress of another rank whose bytes this rank needs

    def checked(self) -> Self:
        """Check the options. Raises InvalidInput. Call this inside an exchange, so that all ranks raise the error."""
        patterns = usable_patterns(self.ignore_mismatched, "ignore_mismatched") or ()
        if self.unread not in get_args(Unread):
            raise InvalidInput(f'unread={self.unread!r:.80} is not valid: pass "warn" or "ignore"')
        return replace(self, ignore_mismatched=tuple(patterns), threads=usable_threads(self.threads))


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


def renamer(rename: Any) -> Callable[[str], str]:
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
        rule = first_match(rules, key)
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


def first_match(rules: Iterable[tuple[re.Pattern[str], T]], name: str) -> tuple[re.Match[str], T] | None:
    """Return the match of the first rule that matches ``name`` in full, and the rule's value."""
    for pattern, value in rules:
        match = pattern.fullmatch(name)
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
