"""The cells that a save may reuse: of the newest checkpoint of its run, then of other runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from casckpt.contents import blobs, manifests
from casckpt.errors import CasckptError
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Name
from casckpt.history.commits import Commit
from casckpt.history.following import is_live, newest_of_runs
from casckpt.plan.reuse import ManifestCells, ReusableCells
from casckpt.repository.repository import Repository
from casckpt.saving.options import Compress
from casckpt.saving.shares import Share, Streams

log = logging.getLogger(__name__)
_MAX_BASES = 8

DamagedBlobs: TypeAlias = frozenset[tuple[TxId, BlobHash]]
"""Blobs that are marked as damaged."""


@dataclass(frozen=True)
class LastShare:
    """A rank's own share of the last checkpoint that it helped to save, and which of its blobs are worn.

    It goes by the transaction: a checkpoint that was purged and copied back has the same id, and other places.
    """

    txid: TxId
    share: Share
    worn: frozenset[tuple[TxId, BlobHash]]


@dataclass(frozen=True)
class ReuseOffer:
    """What rank 0 tells the others: whose cells may be reused, and which blobs not.

    ``commits``: of the run itself, if it has a parent, and of others; None where each rank remembers its own share.
    ``compress``: as rank 0 was told, or else the store says.
    ``manifests``: of these, what the others need not read again.
    ``unlooked``: streams of the parent whose health nobody knows; None where none is asked for.
    """

    commits: Sequence[Commit] | None = ()
    compress: Compress = "off"
    damaged: DamagedBlobs = frozenset()
    manifests: Sequence[tuple[Commit, Manifest]] = ()
    unlooked: frozenset[Name] | None = None

    def to_tell(self, repo: Repository, told: Collection[TxId | None] = ()) -> ReuseOffer:
        """The same, for ranks all of which have ``told`` which transaction they remember their share of."""
        commits = self.commits or ()
        if len(commits) == 1 and {commits[0].txid} == {*told}:
            return replace(self, commits=None)
        held = ((commit, readable(repo, commit)) for commit in commits)
        return replace(self, manifests=[(commit, read) for commit, read in held if read is not None])


def reusable(repo: Repository, parent: Commit | None, streams: Streams, *, run: str, dedup: str) -> ReuseOffer:
    """What a save of ``streams`` may reuse: of ``parent``, and of other runs for what that one lacks.

    All were live after the transaction began: ``parent`` was read then, and others are read now.
    """
    held = None if parent is None else readable(repo, parent, warn=True)
    commits = [] if parent is None or held is None else [parent]
    if dedup == "store" and _lacks(held, streams):
        commits += newest_of_runs(repo, is_live, but=run, skip_doubtful=True)[:_MAX_BASES]
    return ReuseOffer(commits, damaged=frozenset(blobs.damaged_marks(repo) if commits else ()))


def known_from(repo: Repository, run: str, knowledge: ReuseOffer, remembered: LastShare | None = None) -> ReusableCells:
    """The cells that a rank of a save of ``run`` may reuse: it reads the manifests that it was not told."""
    if knowledge.commits is None and remembered is not None:
        return ReusableCells(remembered.share, [], _avoid(knowledge.damaged | remembered.worn))
    for commit, manifest in knowledge.manifests:
        manifests.adopt(repo, commit, manifest)
    held = ((commit, readable(repo, commit)) for commit in knowledge.commits or ())
    cells = [(commit.run == run, ManifestCells(read)) for commit, read in held if read is not None]
    parent = next((one for is_parent, one in cells if is_parent), None)
    return ReusableCells(parent, [one for _, one in cells if one is not parent], _avoid(knowledge.damaged))


def _avoid(damaged: DamagedBlobs) -> Callable[[BlobRef], bool]:
    return lambda ref: ref.worn or (ref.uploader, ref.hash) in damaged


def readable(repo: Repository, commit: Commit, *, warn: bool = False) -> Manifest | None:
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


def _lacks(parent: Manifest | None, streams: Streams) -> bool:
    """Is there a stream that the parent does not have in this form?"""
    if parent is None:
        return True
    have = {entry.name: (entry.dtype, entry.shape) for entry in parent.held}
    return any(have.get(name) != form for name, form in streams.items())
