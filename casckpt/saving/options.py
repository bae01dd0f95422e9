"""The arguments of a save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, SupportsFloat, TypeAlias, TypedDict, get_args

from casckpt.base.names import MAX_METRIC_NAME, MAX_METRICS, check_new_run, check_step
from casckpt.base.parallel import usable_threads
from casckpt.base.text import listed, warn_once
from casckpt.errors import InvalidInput
from casckpt.format.metrics import LINEAGE, plain_metadata, stored_metrics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from casckpt.base.progress import Shown

log = logging.getLogger("casckpt")

Compress: TypeAlias = Literal["auto", "off", "always"]
CheckReplicas: TypeAlias = Literal["raise", "sample", "off"] | bool
"""True means "raise". False means "off"."""
Metrics: TypeAlias = Mapping[str, SupportsFloat]
"""A mapping from names to numbers. A value is a real number, a bool, or a tensor or array with one element."""
Frozen: TypeAlias = Callable[[str], bool] | Sequence[str] | None
"""The tensors that are declared frozen, as a function of the flat key, or as fnmatch patterns."""
Owners: TypeAlias = Callable[[str], int | None] | None
"""A function that maps a flat key to the only rank that maintains the leaf, or to None if all ranks hold the same
value."""


class Space(Protocol):
    """Looks after the room on the store's disk. A save calls it on rank 0, while the other ranks wait."""

    def check(self, nbytes: Callable[[], int]) -> None:
        """Raise StorageError, as on a full disk, if there is too little room. ``nbytes``: returns the state's size."""

    def free(self) -> str:
        """Free space after a save met a full disk. Return "", or what would help if a second try would be in vain."""


class StateArguments(TypedDict, total=False):
    """The keyword arguments that `Store.save`, a DCP writer and a `Checkpointer` share. See `Store.save`."""

    frozen: Frozen
    compress: Compress | None
    health: bool
    check_replicas: CheckReplicas
    allow_pickle: bool


class WriterArguments(StateArguments, total=False):
    """The keyword arguments that `Store.save` and a DCP writer share. See `Store.save`."""

    metadata: Mapping[str, Any] | None
    metrics: Metrics | None
    healthy: bool | None
    overwrite: bool
    ephemeral: bool
    attachments: Mapping[str, bytes] | None
    threads: int | None
    progress: Shown | None
    lineage: Mapping[str, Any] | None


class SaveArguments(WriterArguments, total=False):
    """The keyword arguments of `Store.save`, except run and step."""

    owners: Owners
    space: Space | None
    process_group: ProcessGroup | None
    no_dist: bool


class ImportArguments(TypedDict, total=False):
    """The keyword arguments that `Store.save` and all imports share, except the step."""

    run: str
    overwrite: bool
    metadata: Mapping[str, Any] | None
    compress: Compress | None
    progress: Shown | None
    lineage: Mapping[str, Any] | None


class UnpicklingArguments(ImportArguments, total=False):
    """The keyword arguments of imports of formats that may hold pickles."""

    allow_pickle: bool


def usable_compress(given: str) -> Compress:
    """Return ``given`` if it is a value of `Compress`. Otherwise, raises InvalidInput."""
    compress: Compress | None = next((known for known in get_args(Compress) if known == given), None)
    if compress is None:
        raise InvalidInput(f"compress={given!r} is not valid: pass 'auto', 'off' or 'always'")
    return compress


def compress_of(option: str | None, setting: str | None) -> Compress:
    """Return the option or else the store's setting. A setting that only later versions know counts as "off"."""
    known: Compress = next((one for one in get_args(Compress) if one == setting), "off")
    return usable_compress(option or known)


def usable_check(given: CheckReplicas) -> Literal["raise", "sample", "off"]:
    """Return ``check_replicas`` as a string. Raises InvalidInput if the value is not valid."""
    for word, meant in (("raise", True), ("off", False), ("sample", "sample")):
        if given is meant or given == word:
            return word  # type: ignore[return-value] # one of the three
    raise InvalidInput(f"check_replicas={given!r:.40} is not valid: pass 'raise', 'sample' or 'off'")


def usable_metrics(run: str, given: Any, *, first: Collection[str] = ()) -> dict[str, Any]:
    """Return metrics in stored form. Those that cannot be stored are left out, and the log names them once.

    ``first``: the names to keep if there are too many.
    """
    left = list[str]()
    stored = stored_metrics(given, left, first=first)
    most = f"a checkpoint has up to {MAX_METRICS} numbers, with names of up to {MAX_METRIC_NAME} characters"
    _warn(run, "the metrics", left, most)
    return stored


def _warn(run: str, what: str, left: Sequence[str], why: str) -> None:
    from casckpt.ranks.ranks import this_rank  # late, because it imports torch

    if left and not this_rank():
        warn_once(log, "a save of run %r leaves out %s: %s (%s)", run, what, listed(left), why)


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """The declaration of the arguments of a save that are also settings of a `Checkpointer`."""

    #: patterns or a function: [tensors that did not change](guide.md#deduplication)
    frozen: Frozen = None
    #: `"off"`, `"auto"`, or `"always"`; by default, the store's setting ([costs](costs.md))
    compress: Compress | None = None
    #: records NaN, infinities, and the largest values of changed tensors; a checkpoint with NaN is unhealthy
    health: bool = False
    #: how to compare [replicas](ranks.md): `"sample"` compares samples, `"raise"` compares all bytes and
    #: refuses any difference, and `"off"` does not compare
    check_replicas: CheckReplicas = "sample"
    #: a function that maps a flat key to its [owner](ranks.md), the only rank that maintains the value, or
    #: to None
    owners: Owners = None
    #: pickles values that are neither tensors nor plain data
    allow_pickle: bool = False

    def check_choices(self) -> None:
        """Raise InvalidInput if ``compress`` or ``check_replicas`` is not one of its values."""
        if self.compress is not None:
            usable_compress(self.compress)
        usable_check(self.check_replicas)


@dataclass(frozen=True, kw_only=True)
class SaveOptions(StateOptions):
    """The declaration of the arguments of a save: the run, the step, and those in `SaveArguments`.

    docs/settings.md shows the comments.
    """

    #: the run
    run: str = "default"
    #: the step; required
    step: int
    #: a dict of values that JSON can represent
    metadata: Mapping[str, Any] | None = None
    #: up to 64 named numbers, for listings and `keep_best`; others are left out with a warning
    metrics: Mapping[str, SupportsFloat | str] | None = None
    #: your verdict on whether training should resume from this checkpoint
    healthy: bool | None = None
    #: forgets an existing checkpoint of this run and step once the new one is committed
    overwrite: bool = False
    #: marks the checkpoint as short-lived: once it is forgotten, gc purges it after `min_age_ephemeral`
    ephemeral: bool = False
    #: small files by name
    attachments: Mapping[str, bytes] | None = None
    #: the number of threads that copy, hash, and write; by default, the number of cores, but at least 2 and at most 8
    threads: int | None = None
    #: a function that is called with the bytes done and the total bytes
    progress: Shown | None = None
    #: [where the state came from](guide.md#lineage), for listings; a `Checkpointer` sets it
    lineage: Mapping[str, Any] | None = None
    #: frees space on a full disk, after which the save is tried once more; a `Checkpointer` sets it
    space: Space | None = None
    #: the ranks that save together; by default, all ranks
    process_group: ProcessGroup | None = None
    #: lets this process save alone
    no_dist: bool = False

    def checked(self) -> Self:
        """Check the options. Return them with metrics and metadata in stored form, without what cannot be stored.

        The log names what was left out. Raises InvalidInput if any other option is not valid.

        Call this inside an exchange, so that all ranks raise the error.
        """
        self.check_choices()
        if self.healthy is not None and type(self.healthy) is not bool:
            raise InvalidInput(f"healthy={self.healthy!r:.40} is not valid: pass True, False, or None for no verdict")
        if type(self.health) is not bool:
            raise InvalidInput(f"health={self.health!r:.40} is not valid: pass True to scan changed cells, or False")
        if self.owners is not None and not callable(self.owners):
            raise InvalidInput(f"owners={self.owners!r:.40} is not valid: pass a function from a flat key to a rank")
        left, unfit = list[str](), list[str]()
        lineage = plain_metadata(self.lineage or {}, unfit, "lineage")
        if unfit := [*unfit, *(lineage.keys() - {*LINEAGE})]:
            names = ", ".join(LINEAGE)
            raise InvalidInput(f"lineage cannot hold {listed(unfit)}: pass plain data under the names {names}")
        check = usable_check(self.check_replicas)
        run, step, threads = check_new_run(self.run), check_step(self.step), usable_threads(self.threads)
        metadata = plain_metadata(self.metadata or {}, left)
        _warn(run, "what JSON cannot represent", left, "put it into an attachment or the train state")
        metrics, ephemeral = usable_metrics(run, self.metrics), bool(self.ephemeral)
        return replace(
            self, run=run, step=step, metadata=metadata, metrics=metrics, ephemeral=ephemeral, threads=threads,
            check_replicas=check, lineage=lineage,
        )  # fmt: skip
