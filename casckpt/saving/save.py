"""A native save on every rank: two to four exchanges, and this rank's work between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np

from casckpt.base.lazy import cached_property
from casckpt.base.progress import Progress
from casckpt.errors import Revoked
from casckpt.format.records import DEFAULT_CELL_BYTES
from casckpt.format.sections.columns import Ints
from casckpt.history.commits import Commit, just_committed
from casckpt.plan.writers import MORE_RUNS, Words, row_digests
from casckpt.ranks.ranks import Ranks, telling
from casckpt.repository.repository import Repository
from casckpt.saving.apart import Apart, apart
from casckpt.saving.layout import RankLayout, assigned, layout_of
from casckpt.saving.leader import BeginAnswer, BeginRequest, GroupMemory, Leader, Planned
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared
from casckpt.saving.rank_part import RankPart, write_part
from casckpt.saving.replicas import Samples, runs_of, seed_of
from casckpt.saving.reuse_offer import LastShare, ReuseOffer
from casckpt.saving.shares import Share

log = logging.getLogger(__name__)


def save(
    repo: Repository, ranks: Ranks, memory: GroupMemory, prepare: Callable[[], Prepared], options: SaveOptions
) -> Commit:
    """Store and commit a state. Every rank of ``ranks`` must make this call.

    Calls ``prepare`` once, inside an exchange, so that an error reaches all ranks. If gc revokes the save, this
    retries it once, without reuse. Raises Conflict if the step exists.
    """
    progress, once = Progress(options.progress), cache(prepare)
    try:
        return _Attempt(repo, ranks, memory, once, options, progress=progress, reuse=True).run()
    except Revoked:
        log_retry(options)
        return _Attempt(repo, ranks, memory, once, options, progress=progress, reuse=False).run()


def log_retry(options: SaveOptions) -> None:
    """Log that a save was revoked, and that a second attempt begins."""
    log.warning(
        "gc assumed that the save of %s@%d was dead, and revoked it; casckpt retries it once, without reuse",
        options.run,
        options.step,
    )


def compare(repo: Repository, ranks: Ranks, memory: GroupMemory, prepared: Prepared, options: SaveOptions) -> None:
    """Compare values across ``ranks``, as `save` does before it writes. Every rank must make this call.

    ``memory``: must not belong to a save. Raises InvalidInput if the states of the ranks contradict each other.
    """
    _Attempt(repo, ranks, memory, lambda: prepared, options, progress=Progress(None), reuse=False).planned()


class _Attempt:
    """One attempt to save, on one rank."""

    def __init__(
        self,
        repo: Repository,
        ranks: Ranks,
        memory: GroupMemory,
        prepare: Callable[[], Prepared],
        options: SaveOptions,
        *,
        progress: Progress,
        reuse: bool,
    ) -> None:
        self.repo, self.ranks, self.memory = repo, ranks, memory
        self.options, self.progress = options, telling(ranks, progress)
        self._prepare = prepare if not memory.apart else cache(lambda: apart(prepare(), memory.apart))
        self._last = memory.shares.get(options.run)  # read once, because another thread may change it
        self._share: Share | None = None
        self._seed = seed_of(options.run, options.step)
        self._runs = runs_of(str(options.check_replicas))
        self.leader = Leader(repo, ranks.size, memory, self.options, reuse=reuse, last=self._last)

    def run(self) -> Commit:
        """Save the state. Return the same commit on every rank."""
        try:
            begun = self.ranks.exchange(self._request, self.leader.begin)
            offer = self._follow_new_plan() if begun.offer is None else begun.offer
            record, worn = self.ranks.exchange(partial(self._write, begun, offer), self.leader.finish)
        except BaseException as error:
            self.leader.abort(error)
            raise
        self.memory.compared.turn += 1
        if self.ranks.size == 1:
            self.memory.shares.clear()  # the memory of one share is enough
        if self._share is not None:
            self.memory.shares[self.options.run] = LastShare(record.txid, self._share, worn)
        return just_committed(record)

    def _follow_new_plan(self) -> ReuseOffer:
        assignment, offer = self.planned()
        self.memory.fingerprint, self.memory.assignment = self._layout.fingerprint, assignment
        self.memory.compared.plan(assignment.sets)
        self.memory.shares.clear()  # they belong to the previous assignments
        return offer

    def planned(self) -> Planned:
        """Compare values across ranks. Return this rank's writes, and the cells that it may reuse."""
        answer = self.ranks.exchange(self._sampled, self.leader.plan)
        if isinstance(answer, Apart):
            self.memory.apart |= answer.keys
            parts = apart(self._prepare(), answer.keys)
            self._prepare, self._layout = lambda: parts, layout_of(parts, self._cell_bytes())
            return self.planned()
        if isinstance(answer, list):
            rows = np.array(answer, np.int64)
            return self.ranks.exchange(lambda: self._samples(MORE_RUNS, rows), self.leader.judge)
        return answer

    def _request(self) -> BeginRequest:
        prepared, alone, options, memory = self._prepare(), self.ranks.size == 1, self.options, self.memory
        fingerprint = "" if alone else self._layout.fingerprint
        if fingerprint != memory.fingerprint:
            memory.assignment, memory.compared.sets = None, ()
        last = self._last
        if alone and last is not None:
            prepared.share_streams(last.share.extents)
        return BeginRequest(
            f"{options.run}@{options.step} (dedup={options.dedup!r}, check_replicas={options.check_replicas!r})",
            fingerprint,
            memory.plan_number,
            None if last is None else last.txid,
            prepared.streams if alone else {},
            {} if alone else memory.compared.set_digests(prepared, self._layout, self._seed, self._runs),
        )

    def _samples(self, runs: int, rows: Ints | None = None) -> Words:
        return self.memory.compared.samples(self._prepare(), self._layout, self._seed, runs, rows)

    def _sampled(self) -> Samples:
        layout = self._layout
        if self.options.check_replicas == "off":
            return Samples(layout, np.zeros((len(layout.held), 0), np.uint64))  # reports no difference
        return Samples(layout, row_digests(self._samples(self._runs))[:, None])

    @cached_property
    def _layout(self) -> RankLayout:
        return layout_of(self._prepare(), self._cell_bytes())

    def _cell_bytes(self) -> int:
        """Return the store's cell size, or the default if this save creates the store."""
        return self.repo.marker.cell_bytes if self.repo.exists() else DEFAULT_CELL_BYTES

    def _write(self, begun: BeginAnswer, offer: ReuseOffer) -> RankPart:
        """Perform this rank's writes. Return when they are durable."""
        if self.ranks.rank != 0:
            begun.home.check_shared(self.repo, begun.txid)
        prepared, options, memory = self._prepare(), self.options, self.memory
        ranges = None if memory.assignment is None else memory.assignment.ranges
        own = prepared if ranges is None else assigned(prepared, ranges, self.ranks.rank)
        part = write_part(self.repo, begun.txid, offer, [own], options, progress=self.progress, last=self._last)
        self._share = part.share
        if self.ranks.size == 1:
            return replace(part, tree=prepared.tree)
        if ranges is not None and options.check_replicas == "sample":
            return replace(part, reread=memory.compared.read_again(prepared, self._layout, ranges))
        return part
