"""A native save on every rank: two to four exchanges, and this rank's work between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np

from casckpt.base.lazy import cached_property
from casckpt.base.progress import Progress
from casckpt.errors import Revoked, StorageError
from casckpt.format.records import DEFAULT_CELL_BYTES, Committed
from casckpt.format.sections.columns import Ints
from casckpt.format.sections.tables import Streams
from casckpt.history.commits import Commit, just_committed
from casckpt.plan.writers import MORE_RUNS, Words, row_digests
from casckpt.ranks.ranks import Ranks, everyone, telling
from casckpt.repository.repository import Repository
from casckpt.saving.apart import apart
from casckpt.saving.layout import RankLayout, assigned, layout_of
from casckpt.saving.leader import BeginAnswer, BeginRequest, GroupMemory, Leader, Planned, WornBlobs
from casckpt.saving.options import SaveOptions, Space
from casckpt.saving.prepare import Prepared
from casckpt.saving.rank_part import RankPart, write_part
from casckpt.saving.replicas import Samples, runs_of, seed_of
from casckpt.saving.reuse_offer import LastShare, ReuseOffer, reusable_cells
from casckpt.saving.shares import Share

log = logging.getLogger(__name__)


def save(
    repo: Repository, ranks: Ranks, memory: GroupMemory, prepare: Callable[[], Prepared], options: SaveOptions
) -> Commit:
    """Store and commit a state. Every rank of ``ranks`` must make this call. Return the same commit on every rank.

    Calls ``prepare`` once, inside an exchange, so that an error reaches all ranks. If gc revokes the save, this
    retries it once, without reuse. If the disk is full, it retries it once after ``space`` of the options has freed
    some. Raises Conflict if the step exists.
    """
    progress, once, reuse = Progress(options.progress), cache(prepare), True
    space = options.space
    while True:
        mine = _OwnState(repo, ranks, memory, once, options)
        leader = Leader(repo, ranks.size, memory, options, reuse=reuse, last=mine.last)  # used on rank 0 only
        try:
            with leader.aborting():
                begun = ranks.exchange(mine.request, leader.begin)  # begins the transaction, then reads the parent
                offer = mine.follow(_planned(ranks, leader, mine)) if begun.offer is None else begun.offer
                # every rank finds or stores each of its cells, durably
                write = partial(mine.write, begun, offer, telling(ranks, progress))
                record, worn = ranks.exchange(write, leader.finish)  # merges the shares, puts the manifest, commits
        except Revoked:
            if not reuse:
                raise
            log_retry(options)
            reuse = False
        except Exception as error:
            failure = ranks.failure or error  # the same on all ranks, even if some have an error of their own
            if space is None or not (isinstance(failure, StorageError) and failure.full):
                raise
            _make_room(ranks, space, failure)
            space = None
        else:
            mine.remember(record, worn)
            return just_committed(record)


def _planned(ranks: Ranks, leader: Leader, mine: _OwnState) -> Planned:
    """Compare values across ranks. Return this rank's writes, and the cells that it may reuse."""
    answer = ranks.exchange(mine.sampled, leader.plan)
    while isinstance(answer, frozenset):
        mine.take_apart(answer)
        answer = ranks.exchange(mine.sampled, leader.plan)
    if isinstance(answer, list):
        return ranks.exchange(partial(mine.samples, MORE_RUNS, np.array(answer, np.int64)), leader.judge)
    return answer


def _make_room(ranks: Ranks, space: Space, failure: StorageError) -> None:
    """Free space on rank 0. Raise ``failure``, with advice, if a second try would be in vain. Every rank calls this."""
    advice = ranks.exchange(bool, lambda found: everyone(space.free(), len(found)))
    if advice:
        raise StorageError(f"{failure}. {advice}", **vars(failure)) from failure


def log_retry(options: SaveOptions) -> None:
    """Log that a save was revoked, and that a second attempt begins."""
    log.warning(
        "gc assumed that the save of %s@%d was dead, and revoked it; casckpt retries it once, without reuse",
        options.run,
        options.step,
    )


def compare(repo: Repository, ranks: Ranks, memory: GroupMemory, prepared: Prepared, options: SaveOptions) -> Streams:
    """Compare values across ``ranks``, as `save` does before it writes. Every rank must make this call.

    Return, on rank 0, the streams of all ranks. ``memory``: must not belong to a save. Raises InvalidInput if the
    states of the ranks contradict each other.
    """
    leader = Leader(repo, ranks.size, memory, options, reuse=False)
    _planned(ranks, leader, _OwnState(repo, ranks, memory, lambda: prepared, options))
    return {} if memory.plan is None else memory.plan.streams


class _OwnState:
    """The state of one rank in one attempt to save. ``last``: the rank's last share of the run."""

    def __init__(
        self, repo: Repository, ranks: Ranks, memory: GroupMemory, prepare: Callable[[], Prepared], options: SaveOptions
    ) -> None:
        self.repo, self.ranks, self.memory, self.options = repo, ranks, memory, options
        self.last = memory.shares.get(options.run)  # read once, because another thread may change it
        self._prepare = prepare if not memory.apart else cache(lambda: apart(prepare(), memory.apart))
        self._share: Share | None = None
        self._seed = seed_of(options.run, options.step)
        self._runs = runs_of(str(options.check_replicas))

    @cached_property
    def _layout(self) -> RankLayout:
        return layout_of(self._prepare(), self._cell_bytes())

    def _cell_bytes(self) -> int:
        """Return the store's cell size, or the default if this save creates the store."""
        return self.repo.marker.cell_bytes if self.repo.exists() else DEFAULT_CELL_BYTES

    def request(self) -> BeginRequest:
        """Return this rank's first message."""
        prepared, alone, options, memory = self._prepare(), self.ranks.size == 1, self.options, self.memory
        fingerprint = "" if alone else self._layout.fingerprint
        if fingerprint != memory.fingerprint:
            memory.assignment, memory.compared.sets = None, ()
        last = self.last
        if alone and last is not None:
            prepared.share_streams(last.share.extents)
        return BeginRequest(
            f"{options.run}@{options.step} (check_replicas={options.check_replicas!r})",
            fingerprint,
            memory.plan_number,
            None if last is None else last.txid,
            prepared.streams if alone else {},
            {} if alone else memory.compared.set_digests(prepared, self._layout, self._seed, self._runs),
        )

    def samples(self, runs: int, rows: Ints | None = None) -> Words:
        """Return samples of this rank's values, or only of these rows of its layout."""
        return self.memory.compared.samples(self._prepare(), self._layout, self._seed, runs, rows)

    def sampled(self) -> Samples:
        """Return the layout, with a digest of the samples of each row."""
        layout = self._layout
        if self.options.check_replicas == "off":
            return Samples(layout, np.zeros((len(layout.held), 0), np.uint64))  # reports no difference
        return Samples(layout, row_digests(self.samples(self._runs))[:, None])

    def take_apart(self, keys: frozenset[str]) -> None:
        """Describe tensors in parts, because other ranks hold them in this form."""
        self.memory.apart |= keys
        parts = apart(self._prepare(), keys)
        self._prepare, self._layout = lambda: parts, layout_of(parts, self._cell_bytes())

    def follow(self, planned: Planned) -> ReuseOffer:
        """Follow a new plan from now on. Return the offer that came with it."""
        assignment, offer = planned
        self.memory.fingerprint, self.memory.assignment = self._layout.fingerprint, assignment
        self.memory.compared.plan(assignment.sets)
        self.memory.shares.clear()  # they belong to the previous assignments
        return offer

    def write(self, begun: BeginAnswer, offer: ReuseOffer, progress: Progress) -> RankPart:
        """Perform this rank's writes. Return when they are durable."""
        if self.ranks.rank != 0:
            begun.home.check_shared(self.repo, begun.txid)
        prepared, options, memory = self._prepare(), self.options, self.memory
        ranges = None if memory.assignment is None else memory.assignment.ranges
        own = prepared if ranges is None else assigned(prepared, ranges, self.ranks.rank)
        known = reusable_cells(self.repo, options.run, offer, self.last)
        part = write_part(self.repo, begun.txid, offer, [own], options, known=known, progress=progress)
        self._share = part.share
        if self.ranks.size == 1:
            return replace(part, tree=prepared.tree)
        if ranges is not None and options.check_replicas == "sample":
            return replace(part, reread=memory.compared.read_again(prepared, self._layout, ranges))
        return part

    def remember(self, record: Committed, worn: WornBlobs) -> None:
        """Keep what makes the next save faster."""
        self.memory.compared.turn += 1
        if self.ranks.size == 1:
            self.memory.shares.clear()  # the memory of one share is enough
        if self._share is not None:
            self.memory.shares[self.options.run] = LastShare(record.txid, self._share, worn)
