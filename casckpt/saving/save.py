"""A save on every rank: at most three exchanges, with the work of this rank between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from casckpt.base.lazy import cached_property
from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress
from casckpt.contents import blobs
from casckpt.errors import Revoked
from casckpt.format.columns import Ints
from casckpt.format.keys import uploader_folder
from casckpt.format.names import TxId
from casckpt.format.records import DEFAULT_CELL_BYTES
from casckpt.history.commits import Commit, just_committed
from casckpt.plan.reuse import ReusableCells
from casckpt.plan.writers import MORE_RUNS, Words, row_digests
from casckpt.ranks.ranks import Ranks, telling
from casckpt.repository.repository import Repository
from casckpt.saving.encoder import Coder, coding
from casckpt.saving.health_scan import HealthScan
from casckpt.saving.layout import RankLayout, assigned, layout_of
from casckpt.saving.leader import (
    BeginAnswer,
    BeginRequest,
    FinishAnswer,
    FinishRequest,
    GroupMemory,
    Leader,
    Planned,
)
from casckpt.saving.local_entries import Cell, plan_work
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, tensors_of
from casckpt.saving.replicas import Samples, runs_of, seed_of
from casckpt.saving.reuse_offer import LastShare, ReuseOffer, known_from
from casckpt.saving.shares import Share, share_of
from casckpt.saving.upload import PlacedCell, Upload
from casckpt.tensors.gpu import wait_for_gpus

log = logging.getLogger(__name__)


def save(
    repo: Repository, ranks: Ranks, memory: GroupMemory, prepare: Callable[[], Prepared], options: SaveOptions
) -> Commit:
    """Store and commit; every rank of ``ranks`` calls it. ``prepare`` is called once, where its errors reach all ranks.

    Raises Conflict if the step exists. A save that a gc revoked is tried once more, from nothing.
    """
    progress, once = Progress(options.progress), cache(prepare)
    try:
        return _Attempt(repo, ranks, memory, once, options, progress=progress, reuse=True).run()
    except Revoked:
        log.warning("a gc took the save of %s@%d for dead; saving again", options.run, options.step)
        return _Attempt(repo, ranks, memory, once, options, progress=progress, reuse=False).run()


def compare(repo: Repository, ranks: Ranks, memory: GroupMemory, prepared: Prepared, options: SaveOptions) -> None:
    """Compare what ``ranks`` hold, as `save` does before it writes anything. ``memory``: one that no save has.

    Every rank calls it. Raises InvalidInput where their parts contradict each other.
    """
    _Attempt(repo, ranks, memory, lambda: prepared, options, progress=Progress(None), reuse=False).planned()


class _Attempt:
    """One attempt, on one rank."""

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
        self._prepare = prepare
        self._share: Share | None = None
        self._seed = seed_of(options.run, options.step)
        self._runs = runs_of(str(options.check_replicas))
        self.leader = Leader(repo, ranks.size, memory, self.options, reuse=reuse)

    def run(self) -> Commit:
        """The commit, as every rank returns it."""
        try:
            done = self._exchange_all()
        except BaseException as error:
            self.leader.abort(error)
            raise
        self.memory.compared.turn += 1
        if self._share is not None and self.ranks.size > 1:
            self.memory.remembered[self.options.run] = LastShare(done.record.txid, self._share, done.worn)
        return just_committed(done.record)

    def _exchange_all(self) -> FinishAnswer:
        start = self.ranks.exchange(self._hello, self.leader.begin)
        knowledge = start.knowledge
        if knowledge is None:
            planned = self.planned()
            self.memory.fingerprint = self._layout.fingerprint
            self.memory.plan_number, self.memory.duty = planned.number, planned.duty
            self.memory.compared.plan(planned.sets)
            self.memory.remembered.clear()  # shares of other duties
            knowledge = planned.knowledge
        told = knowledge
        return self.ranks.exchange(lambda: self._store(start, told), self.leader.finish)

    def planned(self) -> Planned:
        """What this rank is to write, once the ranks have compared what they hold."""
        planned = self.ranks.exchange(self._sampled, self.leader.plan)
        if isinstance(planned, list):
            rows = np.array(planned, np.int64)
            return self.ranks.exchange(lambda: self._samples(MORE_RUNS, rows), self.leader.judge)
        return planned

    def _hello(self) -> BeginRequest:
        prepared, alone = self._prepare(), self.ranks.size == 1
        fingerprint = "" if alone else self._layout.fingerprint
        if fingerprint != self.memory.fingerprint:
            self.memory.duty, self.memory.plan_number, self.memory.compared.sets = None, 0, ()
        remembered = self.memory.remembered.get(self.options.run)
        streams = {source.name: (source.dtype, source.shape) for source in prepared.sources} if alone else None
        return BeginRequest(
            self.options.run,
            self.options.step,
            self.options.dedup,
            fingerprint,
            self.memory.plan_number,
            remembered.txid if remembered else None,
            streams,
            self.options.check_replicas,
            {} if alone else self.memory.compared.set_digests(prepared, self._layout, self._seed, self._runs),
        )

    def _samples(self, runs: int, rows: Ints | None = None) -> Words:
        return self.memory.compared.samples(self._prepare(), self._layout, self._seed, runs, rows)

    def _sampled(self) -> Samples:
        layout = self._layout
        if self.options.check_replicas == "off":
            return Samples(layout, np.zeros((len(layout.held), 0), np.uint64))  # nothing differs
        return Samples(layout, row_digests(self._samples(self._runs))[:, None])

    @cached_property
    def _layout(self) -> RankLayout:
        return layout_of(self._prepare(), self._cell_bytes())

    def _cell_bytes(self) -> int:
        """Of the store; where there is none yet, as the save is about to make it."""
        return self.repo.marker.cell_bytes if self.repo.exists() else DEFAULT_CELL_BYTES

    def _store(self, start: BeginAnswer, knowledge: ReuseOffer) -> FinishRequest:
        """This rank's part: durable when it returns."""
        if self.ranks.rank != 0:
            start.home.check_shared(self.repo, start.txid)
        remembered = self.memory.remembered.get(self.options.run)
        known = known_from(self.repo, self.options.run, knowledge, remembered)
        prepared = self._prepare()
        alone = self.ranks.size == 1
        mine = prepared if alone else assigned(prepared, self.memory.duty, self.ranks.rank)
        threads, progress = self.options.threads, self.progress
        looker = None if knowledge.unlooked is None else HealthScan(knowledge.unlooked)
        with coding(self.repo, known, self.options, told=knowledge.compress) as coder:
            self._share = store_share(
                self.repo, start.txid, mine, known, threads=threads, coder=coder, looker=looker, progress=progress
            )
        again = None
        if self.memory.duty is not None and self.options.check_replicas == "sample":
            again = self.memory.compared.read_again(prepared, self._layout, self.memory.duty)
        tree, health = prepared.tree if alone else None, {} if looker is None else looker.told
        return FinishRequest(self._share, mine.objects, mine.attachments, tree, health, again)


def store_share(
    repo: Repository,
    txid: TxId,
    prepared: Prepared,
    known: ReusableCells,
    *,
    threads: int | None,
    coder: Coder | None = None,
    looker: HealthScan | None = None,
    progress: Progress,
) -> Share:
    """Find or store every cell of this rank, under the transaction's name; durable when it returns.

    The blobs that are reused are looked at: what is not there any more is marked, and its cells are stored anew.
    """
    wait_for_gpus(tensors_of(prepared))
    cell_bytes = repo.marker.cell_bytes
    work = plan_work(prepared.sources, cell_bytes, known)
    progress.expect(sum(cell.nbytes for cells in work for cell in cells))
    upload = Upload(repo, txid, prepared.sources, known, usable_threads(threads), coder, looker, progress)
    if coder is not None:
        coder.expect(prepared.sources, work)
    places = _placed(upload, work)
    if any(upload.written):
        repo.storage.settle(uploader_folder(txid))
    return share_of(prepared.sources, work, places, known=known, written=upload.written, cell_bytes=cell_bytes)


def _placed(upload: Upload, work: Sequence[Sequence[Cell]]) -> list[list[PlacedCell]]:
    places = upload.place(work)
    while missing := _missing(upload.repo, upload.uploader, upload.known, places):
        lost = [
            [cell for cell, place in zip(cells, placed, strict=True) if not missing.isdisjoint(place.needs)]
            for cells, placed in zip(work, places, strict=True)
        ]
        anew = iter([place for placed in upload.place([cells for cells in lost if cells]) for place in placed])
        places = [[place if missing.isdisjoint(place.needs) else next(anew) for place in placed] for placed in places]
    return places


def _missing(repo: Repository, txid: TxId, known: ReusableCells, places: list[list[PlacedCell]]) -> set[int]:
    """Reused blobs that are gone or cut short; marked, so that no later save trusts them."""
    reused = {number for placed in places for place in placed for number in place.needs}
    lost = blobs.check_reused(repo, txid, [known.blobs[number] for number in sorted(reused)])
    names = {(ref.uploader, ref.hash) for ref in lost}
    missing = {number for number in reused if (known.blobs[number].uploader, known.blobs[number].hash) in names}
    for number in missing:
        known.exclude(number)
    return missing
