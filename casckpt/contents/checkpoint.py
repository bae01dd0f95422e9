"""Defines `Checkpoint`, the value that users receive, and the types of its properties. Works without torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from casckpt.base.groups import grouped
from casckpt.base.lazy import cached_property
from casckpt.base.units import time_of
from casckpt.errors import ForgottenWarning
from casckpt.format.metrics import metric_values
from casckpt.format.records import Committed, Dropped
from casckpt.history import tags
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository

if TYPE_CHECKING:
    from casckpt.format.manifest import Manifest  # requires numpy, but a listing does not need manifests
    from casckpt.plan.routes import Link

Frames: TypeAlias = "dict[str, dict[Link, bytes]]"
"""The frames of cells by tensor key."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: its dtype (by torch's name), its global shape, and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """The number of NaN and infinite elements of a tensor, and the largest absolute value of all others, or 0.

    The two parts of a complex number count as separate elements.
    """

    nan: int
    inf: int
    largest: float


@dataclass(frozen=True, slots=True)
class SaveStats:
    """The result of a save, over all ranks. ``bytes_written``: the size of the written blob files.

    ``seconds``: the time until the checkpoint was durable.

    ``bytes_reused``: the size in memory of the tensor data that was already stored. ``bytes_coded``: the size in
    memory of the encoded cells. ``bytes_frames``: the size of their frames. ``bytes_deltas``: the size of the frames
    that have a base.
    """

    bytes_total: int
    bytes_written: int
    bytes_reused: int
    blobs_written: int
    blobs_reused: int
    seconds: float
    bytes_coded: int
    bytes_frames: int
    bytes_deltas: int


@dataclass(frozen=True, slots=True)
class SaveDetails:
    """The details of how a checkpoint was saved. ``parent``: the id of the previous checkpoint of its run.

    ``world_size``: the number of ranks. ``casckpt``, ``torch``: the versions of these packages. ``objects``: the keys
    of values that are not tensors. ``pickled``: the keys of values that are stored as pickles. ``differing``: the keys
    whose values differed across ranks, although these ranks should hold the same values.
    """

    parent: str | None
    world_size: int
    casckpt: str
    torch: str
    objects: tuple[str, ...]
    pickled: tuple[str, ...]
    differing: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a store, based on its commit. The manifest is read when a property first needs it.

    ``missing_keys``: the template keys that the checkpoint lacks (after a load with ``strict=False``).
    ``unread_keys``: the checkpoint keys that the template did not name. ``unread_subtrees``: whole containers among
    these that no rank read. ``mismatched_keys``: the template keys that ``ignore_mismatched`` left unchanged.
    ``notes``: descriptions of parts that an import did not preserve exactly. ``frames``: the frames that updates
    decoded. The next update applies them to the state in memory. Frames are never pickled.
    """

    repo: Repository = field(repr=False)
    commit: Commit = field(repr=False)
    missing_keys: tuple[str, ...] = ()
    unread_keys: tuple[str, ...] = ()
    unread_subtrees: tuple[str, ...] = ()
    mismatched_keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    frames: Frames = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"frames": {}}

    @property
    def _record(self) -> Committed:
        return self.commit.committed

    @property
    def _manifest(self) -> Manifest:
        from casckpt.contents import manifests

        return manifests.get(self.repo, self.commit)

    @property
    def id(self) -> str:
        """The BLAKE3 hash of everything that was saved, as 64 hex digits.

        It does not depend on locations in the store.
        """
        return self.commit.id

    @property
    def run(self) -> str:
        """The run of the checkpoint."""
        return self.commit.run

    @property
    def step(self) -> int:
        """The step at which it was saved."""
        return self.commit.step

    @property
    def created_at(self) -> datetime:
        """The time of the save, in UTC."""
        return time_of(self._record.created_at)

    @property
    def who(self) -> str:
        """Who saved it in this store, as user@host. Of a copy, who copied it."""
        return self._record.who

    @property
    def ephemeral(self) -> bool:
        """Whether it was saved as ephemeral. If so, gc may purge it soon."""
        return self._record.ephemeral

    @property
    def forgotten(self) -> bool:
        """Whether it is forgotten.

        A forgotten checkpoint can only be named by its id, until it is restored or purged.
        """
        return self.commit.is_forgotten

    @property
    def forgotten_by(self) -> str | None:
        """Who forgot it, as user@host. None if it is not forgotten."""
        return self.commit.who if self.forgotten else None

    @property
    def replaced(self) -> bool:
        """Whether this is the checkpoint at its old places, from before it was rewritten."""
        return self.commit.is_old_places

    @property
    def dropped(self) -> Dropped | None:
        """The entries that thinning dropped: the number of tensors, their size, and the rule. None if it is whole."""
        return self.commit.dropped

    @property
    def healthy(self) -> bool | None:
        """Whether training should continue from this checkpoint, as its save declared.

        If the save declared nothing, this is False if the save found NaN, and otherwise None.
        """
        return self._record.healthy

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were saved with it."""
        return metric_values(self._record.metrics)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The user's metadata. Raises Unsigned if the store requires a signature and there is none."""
        if self.repo.trusted is not None:  # a signature does not cover the record
            from casckpt.contents.signatures import get_trusted

            return get_trusted(self.repo, self.commit).metadata
        return deepcopy(found) if (found := self._record.metadata) is not None else self._manifest.metadata

    @property
    def lineage(self) -> dict[str, Any]:
        """The checkpoints or files that the saved state came from; empty if the save recorded none.

        "resumed_from": the ``id``, ``run`` and ``step`` of the checkpoint that the training last loaded.
        "imported_from": the ``path`` that an import read. "merged_from": a list of checkpoints. Any of them may no
        longer exist. Raises Unsigned if the store requires a signature and there is none.
        """
        recorded = self._record.lineage or {}
        if self.repo.trusted is None and None not in recorded.values():  # a signature does not cover the record
            return deepcopy(recorded)
        from casckpt.contents.signatures import get_trusted
        from casckpt.format.sections.index import lineage_of

        return lineage_of(get_trusted(self.repo, self.commit).body.notes)

    @property
    def holds_files(self) -> bool:
        """Whether it holds a folder or file of another program, as `Store.import_files` stores it."""
        from casckpt.contents.signatures import get_trusted
        from casckpt.format.sections.recipe import NOTE

        return NOTE in get_trusted(self.repo, self.commit).body.notes

    @property
    def child_lineage(self) -> dict[str, Any]:
        """The ``lineage`` for the saves of a training that has loaded this checkpoint."""
        return {"resumed_from": {"id": self.id, "run": self.run, "step": self.step}}

    @property
    def tags(self) -> list[str]:
        """The tags that currently name it, sorted. Tags with damaged records are omitted."""
        return tags.tags_of(tags.list_tags(self.repo).tags, self.commit.id)

    @property
    def signers(self) -> list[str]:
        """The names of the keys that claim to have signed it, sorted. The signatures are not verified."""
        from casckpt.contents.signatures import signers

        return signers(self.repo, self.commit.id)

    @property
    def details(self) -> SaveDetails:
        """The details of its save, from its manifest."""
        from casckpt.format.plain import decode
        from casckpt.format.sections.index import REPLICAS_NOTE

        body, objects = self._manifest.body, self._manifest.objects
        note = body.notes.get(REPLICAS_NOTE)
        return SaveDetails(
            body.parent, body.world_size, body.casckpt, body.torch,
            objects=tuple(dict.fromkeys(one.key for one in objects)),
            pickled=tuple(dict.fromkeys(one.key for one in objects if one.pickled)),
            differing=() if note is None else tuple(decode(note, strict=True)),
        )  # fmt: skip

    @property
    def bytes_hashed(self) -> int:
        """The size of its tensors, except those that its save did not hash completely, as they were declared frozen."""
        from casckpt.format.sections.columns import unpack

        manifest = self._manifest
        unhashed = unpack(manifest.body.entry_columns.unhashed)
        return self.stats.bytes_total - sum(manifest.entries[number].nbytes for number in unhashed)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Its tensors by key, in the order in which they were saved."""
        entries = self._manifest.tensors
        return {key: TensorInfo(entry.dtype, entry.shape, entry.nbytes) for key, entry in entries.items()}

    def matching(self, pattern: str) -> list[str]:
        """Return the keys of the tensors that match an fnmatch pattern.

        A pattern that matches the key of a wrapper selects all tensors in the wrapper.
        """
        manifest = self._manifest
        return [key for key in manifest.tensors if manifest.matches(key, [pattern])]

    @cached_property
    def health(self) -> Mapping[str, TensorHealth] | None:
        """The health of each tensor, by key, over all ranks. None if the save did not check tensors.

        Omits tensors without health figures. These are tensors that were declared frozen, and tensors that do not hold
        numbers.
        """
        from casckpt.format.sections.health import joined, sum_of

        found, keys = self._manifest.health, self._manifest.body.entry_columns.keys
        if found is None:
            return None
        by_key = grouped(found, lambda number: keys[number])
        rows = {key: [found[number] for number in numbers] for key, numbers in by_key.items()}
        return {key: TensorHealth(*sum_of(joined(parts))) for key, parts in rows.items()}

    @property
    def stats(self) -> SaveStats:
        """The statistics of its save."""
        return SaveStats(**{figure.name: getattr(self._record, figure.name) for figure in fields(SaveStats)})

    def __repr__(self) -> str:
        return f"<Checkpoint {self.run}@{self.step} {self.id[:12]}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.commit.places.txid == other.commit.places.txid

    def __hash__(self) -> int:
        return hash(self.commit.places.txid)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A new checkpoint of a watched run. ``late``: whether a later save was already reported or visible."""

    checkpoint: Checkpoint
    late: bool


def warn_if_forgotten(commit: Commit) -> None:
    """Warn, before a load, if the checkpoint is forgotten."""
    if commit.is_forgotten:
        message = f"{commit} was forgotten, so the next gc may purge it; call Store.restore to keep it"
        warnings.warn(message, ForgottenWarning, stacklevel=_level_outside())


def _level_outside() -> int:
    """Return the stack level of the user's code, so that a warning points to a line there."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("casckpt."):
        level, frame = level + 1, frame.f_back
    return level
