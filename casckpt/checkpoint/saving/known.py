"""What a save may reuse: the cells of the run's newest live checkpoint, and of other runs for what that one lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from casckpt.checkpoint.saving.shares import Share, Streams
from casckpt.errors import CasckptError
from casckpt.format.manifest import Manifest, decode
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.plan.reuse import CellSource, KnownCells, ManifestCells
from casckpt.repository import blobs, manifests
from casckpt.repository.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.repository.runs.following import is_live, newest_of_runs

log = logging.getLogger(__name__)
_MAX_BASES = 8

DamagedBlobs: TypeAlias = frozenset[tuple[TxId, BlobHash]]
"""Blobs that are marked as damaged."""


@dataclass(frozen=True)
class Remembered:
    """A rank's own share of the last checkpoint that it helped to save, and which of its blobs are worn.

    It goes by the transaction: a checkpoint that was purged and copied back has the same id, and other places.
    """

    txid: TxId
    share: Share
    worn: frozenset[tuple[TxId, BlobHash]]


@dataclass(frozen=True)
class Knowledge:
    """What rank 0 tells the others: manifests as bytes (None where each remembers its own share), and what to avoid."""

    parent: ManifestId | None
    manifests: tuple[tuple[ManifestId, bytes], ...] | None
    damaged: DamagedBlobs


def nothing_known() -> KnownCells:
    """For a save that must upload everything: the retry of one that was revoked."""
    return KnownCells(None, [], lambda ref: False)


class ReusableManifests:
    """The manifests that a save may reuse: of ``parent``, and of other runs for what that one lacks.

    Both were live after the transaction began: ``parent`` was read then, and others are read now. ``commits``: those of
    the parent, if there is one, and of the bases.
    """

    def __init__(self, repo: Repository, parent: Commit | None, streams: Streams, *, run: str, dedup: str) -> None:
        self._repo = repo
        self.parent = None if parent is None else self._read(parent, warn=True)
        self.bases: list[Manifest] = []
        self.commits: list[Commit] = [] if parent is None or self.parent is None else [parent]
        if dedup == "store" and _lacks(self.parent, streams):
            recent = newest_of_runs(repo, is_live, but=run, skip_doubtful=True)[:_MAX_BASES]
            found = [(commit, base) for commit in recent if (base := self._read(commit, warn=False)) is not None]
            self.bases = [base for _, base in found]
            self.commits += [commit for commit, _ in found]
        self.damaged = frozenset(blobs.damaged_marks(repo) if self.commits else ())

    def are_remembered(self, told: set[TxId | None]) -> bool:
        """Is there the parent alone, whose transaction every rank has ``told`` that it remembers its share of?"""
        return self.parent is not None and not self.bases and told == {self.commits[0].txid}

    def _read(self, commit: Commit, *, warn: bool) -> Manifest | None:
        return _readable(self._repo, commit, warn=warn)

    def known(self) -> KnownCells:
        """For this process."""
        parent = None if self.parent is None else ManifestCells(self.parent)
        return KnownCells(parent, [ManifestCells(base) for base in self.bases], _avoid(self.damaged))

    def knowledge(self) -> Knowledge:
        """For other ranks."""
        all_of = [*([] if self.parent is None else [self.parent]), *self.bases]
        told = [(one.id, data) for one in all_of if (data := _encoded(one)) is not None]
        parent = self.parent.id if self.parent is not None and told and told[0][0] == self.parent.id else None
        return Knowledge(parent, tuple(told), self.damaged)


def known_from(knowledge: Knowledge, remembered: Remembered | None) -> KnownCells:
    """What rank 0 told, on another rank."""
    if knowledge.manifests is None and remembered is not None:
        return KnownCells(remembered.share, [], _avoid(knowledge.damaged | remembered.worn))
    told: list[CellSource] = [ManifestCells(decode(data, id)) for id, data in knowledge.manifests or ()]
    parent = told.pop(0) if knowledge.parent is not None and told else None
    return KnownCells(parent, told, _avoid(knowledge.damaged))


def known_by_reading(repo: Repository, run: str, commits: Sequence[Commit], damaged: DamagedBlobs) -> KnownCells:
    """What `ReusableManifests.commits` of rank 0 hold, on a rank that reads their manifests itself."""
    held = ((commit, _readable(repo, commit, warn=False)) for commit in commits)
    found = [(commit, read) for commit, read in held if read is not None]
    parent = next((ManifestCells(read) for commit, read in found if commit.run == run), None)
    return KnownCells(parent, [ManifestCells(read) for commit, read in found if commit.run != run], _avoid(damaged))


def _avoid(damaged: DamagedBlobs) -> Callable[[BlobRef], bool]:
    return lambda ref: ref.worn or (ref.uploader, ref.hash) in damaged


def _readable(repo: Repository, commit: Commit, *, warn: bool) -> Manifest | None:
    """A manifest, all of it at hand, or None if it is of no use: a save goes on without it."""
    try:
        found = manifests.get(repo, commit)
        found.ready(objects=())
        found.check_entries()
        return found
    except CasckptError as error:
        if warn:
            log.warning("this save reuses nothing of %s@%d: %s", commit.run, commit.step, error)
        return None


def _encoded(manifest: Manifest) -> bytes | None:
    """All bytes of a manifest, or None if a part of it is damaged: a save goes on without it."""
    try:
        return manifest.encoded()
    except CasckptError as error:
        log.warning("this save reuses nothing of %s@%d: %s", manifest.body.run, manifest.body.step, error)
        return None


def _lacks(parent: Manifest | None, streams: Streams) -> bool:
    """Is there a stream that the parent does not have in this form?"""
    if parent is None:
        return True
    have = {entry.name: (entry.dtype, entry.shape) for entry in parent.entries}
    return any(have.get(name) != form for name, form in streams.items())
