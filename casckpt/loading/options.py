"""The arguments of a load, which are checked and passed from the call to the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, TypedDict, get_args

from casckpt.base.parallel import usable_threads
from casckpt.errors import InvalidInput
from casckpt.loading.arguments import Rename, usable_patterns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from casckpt.base.progress import Shown
    from casckpt.contents.checkpoint import Checkpoint

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
    lease: bool


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
    lease: bool = False
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
