"""The cells that a save may reuse: those of the newest checkpoint of its run, then those of other runs."""

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
from casckpt.format.sections.tables import Streams
from casckpt.history.commits import Commit, read_log
from casckpt.history.following import is_live, newest_of_runs
from casckpt.plan.reuse import CellSource, ReusableCells
from casckpt.repository.repository import Repository
from casckpt.saving.options import Compress
from casckpt.saving.shares import Share

log = logging.getLogger(__name__)
_MAX_BASES = 8

DamagedBlobs: TypeAlias = frozenset[tuple[TxId, BlobHash]]
"""Blobs that are marked as damaged."""


@dataclass(frozen=True)
class LastShare:
    """A rank's share of its last checkpoint, and the worn blobs of this share.

    The transaction identifies the checkpoint. The id is not enough: a checkpoint that was purged and copied back has
    the same id, but its cells are in different blobs.
    """

    txid: TxId
    share: Share
    worn: frozenset[tuple[TxId, BlobHash]]


@dataclass(frozen=True)
class ReuseOffer:
    """The cells that rank 0 found for reuse by all ranks of a save.

    ``commits``: the parent, if any, and commits of other runs. ``last``: the transaction of the parent's places, if
    each rank uses its last share instead of ``commits``. ``compress``: rank 0's option, or the store's setting.
    ``damaged``: blobs that must not be reused. ``manifests``: the manifests of ``commits``, so that the other ranks
    need not read them. ``unscanned``: the parent's streams whose health is unknown. None if the save does not scan.
    """

    commits: Sequence[Commit] = ()
    last: TxId | None = None
    compress: Compress = "off"
    damaged: DamagedBlobs = frozenset()
    manifests: Sequence[tuple[Commit, Manifest]] = ()
    unscanned: frozenset[Name] | None = None

    def for_ranks(self, repo: Repository, last: Collection[TxId | None] = ()) -> ReuseOffer:
        """Return the offer for ranks whose last shares belong to the transactions ``last``."""
        if len(self.commits) == 1 and {self.commits[0].places.txid} == {*last}:
            return replace(self, commits=(), last=self.commits[0].places.txid)
        held = ((commit, readable(repo, commit)) for commit in self.commits)
        return replace(self, manifests=[(commit, manifest) for commit, manifest in held if manifest is not None])


def make_offer(
    repo: Repository, parent: Commit | None, streams: Streams, *, run: str, last: LastShare | None = None
) -> ReuseOffer:
    """Offer the cells of ``parent`` for a save of ``streams``, and cells of other runs if it lacks some streams.

    ``last``: the last share of a process that saves alone. If it is the parent, the manifest is not needed. The
    transaction must begin before this call, and before the parent is read. Only then does gc keep all offered
    blobs.
    """
    if parent is not None and last is not None and last.txid == parent.places.txid:  # not if it was rewritten since
        own = last.share.extents
        if own.has_only(streams) or streams.items() <= own.streams.items():
            return ReuseOffer(last=parent.places.txid, damaged=frozenset(blobs.damaged_marks(repo)))
    manifest = None if parent is None else readable(repo, parent, warn=True)
    commits = [] if parent is None or manifest is None else [parent]
    held = {} if manifest is None else {entry.name: (entry.dtype, entry.shape) for entry in manifest.held}
    if not streams.items() <= held.items():
        commits += newest_of_runs(repo, is_live, but=run, skip_doubtful=True)[:_MAX_BASES]
    return ReuseOffer(commits, damaged=frozenset(blobs.damaged_marks(repo) if commits else ()))


def with_commit(repo: Repository, offer: ReuseOffer, commit: Commit) -> ReuseOffer:
    """Add the cells of ``commit`` to an offer if it is live. The transaction must begin before this call."""
    now = read_log(repo, commit.txid)
    if now is None or not now.live or now.txid in {one.txid for one in offer.commits}:
        return offer
    return replace(offer, commits=[*offer.commits, now], damaged=frozenset(blobs.damaged_marks(repo)))


def reusable_cells(repo: Repository, run: str, offer: ReuseOffer, last: LastShare | None = None) -> ReusableCells:
    """Return the cells that a rank of a save of ``run`` may reuse. Reads the manifests that ``offer`` lacks."""
    if last is not None and last.txid == offer.last:
        return ReusableCells(last.share, [], _avoid(offer.damaged | last.worn))
    for commit, manifest in offer.manifests:
        manifests.adopt(repo, commit, manifest)
    held = ((commit, readable(repo, commit)) for commit in offer.commits)
    cells = [(commit.run == run, CellSource.of(one)) for commit, one in held if one is not None]
    parent = next((source for is_parent, source in cells if is_parent), None)
    return ReusableCells(parent, [source for _, source in cells if source is not parent], _avoid(offer.damaged))


def _avoid(damaged: DamagedBlobs) -> Callable[[BlobRef], bool]:
    return lambda ref: ref.worn or (ref.uploader, ref.hash) in damaged


def readable(repo: Repository, commit: Commit, *, warn: bool = False) -> Manifest | None:
    """Read a whole manifest and return it. Return None if it is damaged, because a save does not require it."""
    try:
        manifest = manifests.get(repo, commit)
        manifest.ready(objects=())
        _ = manifest.entries  # raises Refused if they are invalid
        return manifest
    except CasckptError as error:
        if warn:
            log.warning("this save reuses nothing from %s@%d: %s", commit.run, commit.step, error)
        return None
