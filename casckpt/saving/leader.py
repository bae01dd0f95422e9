"""The leader of a save, on rank 0. It begins the save, plans it, and commits the shares of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias

import torch

from casckpt._version import __version__
from casckpt.base.cycle_collector import collector_paused
from casckpt.base.text import is_news, listed
from casckpt.contents import manifests
from casckpt.contents.signatures import sign_save
from casckpt.errors import CasckptError, Damaged, InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.manifest import Draft, Encoded, ObjectEntry
from casckpt.format.metrics import encode_metadata, stored_metrics
from casckpt.format.names import BlobHash, TxId
from casckpt.format.records import Committed, Health
from casckpt.format.sections.health import Rows
from casckpt.format.sections.index import REPLICAS_NOTE, TENSOR, lineage_of
from casckpt.format.sections.tables import Streams, bytes_of
from casckpt.history.commits import Commit, forget, read_log
from casckpt.history.following import newest_reusable
from casckpt.history.transactions import Transaction, begin_save
from casckpt.plan.reuse import bytes_in, coded_bytes, mark_worn
from casckpt.plan.writers import Words, WriteRanges
from casckpt.ranks.agreement import StoreIdentity
from casckpt.repository.repository import Repository
from casckpt.saving.apart import held_apart
from casckpt.saving.health import ParentHealth, health_of_all, summed_health
from casckpt.saving.layout import RankLayout, WritePlan, plan_writes
from casckpt.saving.options import SaveOptions, compress_of
from casckpt.saving.rank_part import RankPart
from casckpt.saving.replicas import (
    Compared,
    Odd,
    ReplicaMemory,
    Samples,
    differing_cells,
    find_odd,
    judged,
)
from casckpt.saving.reuse_offer import LastShare, ReuseOffer, make_offer
from casckpt.saving.shares import Share, merge

log = logging.getLogger(__name__)

_DIFFER = (
    "%s@%d: ranks hold different values of %s. The checkpoint stores one rank's value of each, and all ranks load "
    "it. This is the lowest rank that holds it, unless a front end chose a different rank.%s Synchronize the values "
    "before the save (torch.nn.SyncBatchNorm for batch norms), or wrap values that belong to a single rank in "
    "casckpt.PerRank. This is logged once for each name"
)
_MIXED = " For %s, parts from several ranks were written before the difference was found; later saves use one rank."


@dataclass(frozen=True)
class Assignment:
    """The writes of one rank in a plan. ``number``: the number of the plan.

    ``sets``: see `casckpt.saving.layout.WritePlan`.
    """

    number: int
    ranges: WriteRanges
    sets: Words


@dataclass
class GroupMemory:
    """The data that a rank keeps between a process group's saves, to make later exchanges smaller.

    ``plan``: set only on rank 0. ``fingerprint``: the fingerprint of the layout that this rank's ``assignment``
    belongs to. ``shares``: the last share of each run. ``apart``: see `casckpt.saving.apart`.
    """

    replicas: ReplicaMemory = field(default_factory=ReplicaMemory)
    compared: Compared = field(default_factory=Compared)
    plan: WritePlan | None = None
    fingerprint: str = ""
    assignment: Assignment | None = None
    shares: dict[str, LastShare] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()

    @property
    def plan_number(self) -> int:
        """The number of the plan that this rank follows. It is 0 if there is none."""
        return 0 if self.assignment is None else self.assignment.number


@dataclass(frozen=True)
class BeginRequest:
    """The first message of every rank.

    ``call``: the arguments that must be equal on all ranks. ``last``: the transaction of the rank's last share.
    ``streams``: set only by a rank that saves alone. ``sets``: a digest of samples for each set of ranks that shares
    rows with this rank.
    """

    call: str
    fingerprint: str
    plan_number: int
    last: TxId | None
    streams: Streams
    sets: Mapping[int, bytes]


@dataclass(frozen=True)
class BeginAnswer:
    """The first answer to every rank.

    ``offer``: None if the layouts changed, because the offer is then sent with the new plan.
    """

    txid: TxId
    home: StoreIdentity
    offer: ReuseOffer | None


Planned: TypeAlias = tuple[Assignment, ReuseOffer]
WornBlobs: TypeAlias = frozenset[tuple[TxId, BlobHash]]


class Leader:
    """The work of rank 0 in one attempt of a save.

    Every save calls `start`, `reuse_offer` and `conclude`, or `abort` after an error. A native save passes `begin`,
    `plan`, `judge` and `finish` to its exchanges as decisions. ``last``: rank 0's last share of the run.
    """

    def __init__(
        self,
        repo: Repository,
        size: int,
        memory: GroupMemory,
        options: SaveOptions,
        *,
        reuse: bool,
        last: LastShare | None = None,
    ) -> None:
        self.repo, self.size, self.memory, self.options, self.reuse = repo, size, memory, options, reuse
        self._last = last if size == 1 else None
        self._started = repo.clock()
        self._transaction: Transaction | None = None
        self._parent: Commit | None = None
        self._parent_health = ParentHealth(None)
        self._replaced: list[Commit] = []
        self._streams: Streams = {}
        self._layouts: Sequence[RankLayout] = ()
        self._odd: Odd = ()
        self._asked: list[list[int]] = [[] for _ in range(size)]
        self._differing: dict[str, None] = {}
        self._mixed: dict[str, None] = {}

    def start(self) -> TxId:
        """Begin the transaction, and find the parent.

        Raises Conflict if the step exists and must not be overwritten.
        """
        run, step, overwrite = self.options.run, self.options.step, self.options.overwrite
        self._transaction, self._parent, self._replaced = begin_save(self.repo, run, step, overwrite=overwrite)
        return self._transaction.txid

    def reuse_offer(self, streams: Streams) -> ReuseOffer:
        """Return the cells that a save of ``streams`` may reuse.

        The offer is empty if this attempt uploads everything. Raises StorageError if the disk must keep more room.
        """
        parent, options = self._parent if self.reuse else None, self.options
        if options.space is not None:
            options.space.check(partial(bytes_of, streams))
        offer = ReuseOffer()
        if options.health:
            self._parent_health = ParentHealth.of_commit(self.repo, parent)
            if not self._parent_health.is_readable:
                self._last = None  # without the parent's health, the save must store and scan every cell
        if self.reuse:
            offer = make_offer(self.repo, parent, streams, run=options.run, last=self._last)
        setting = None if self._transaction is None else self._transaction.settings.compress
        offer = replace(offer, compress=compress_of(options.compress, setting))
        return replace(offer, unscanned=self._parent_health.unknown) if options.health else offer

    def begin(self, requests: Sequence[BeginRequest]) -> list[BeginAnswer]:
        """Begin the save. Offer cells for reuse, unless the ranks need a new plan first."""
        _check_agreed(requests)
        txid, home = self.start(), StoreIdentity.of(self.repo)
        if self.size == 1:
            self._streams = requests[0].streams
            return [BeginAnswer(txid, home, self.reuse_offer(self._streams))]
        plan = self.memory.plan
        is_old = plan is None or plan.fingerprints != tuple(request.fingerprint for request in requests)
        is_old = is_old or any(request.plan_number != self.memory.plan_number for request in requests)
        if plan is None or is_old or plan.check != self.options.check_replicas or not _agree(requests):
            return [BeginAnswer(txid, home, None)] * self.size
        self._streams = plan.streams
        offer = self.reuse_offer(plan.streams).for_ranks(self.repo, {request.last for request in requests})
        return [BeginAnswer(txid, home, offer)] * self.size

    def plan(self, samples: Sequence[Samples]) -> Sequence[Planned | list[int] | frozenset[str]]:
        """Plan the writes of each rank. If samples differ, request more samples of some rows instead.

        If ranks hold tensors in different forms, request new layouts with the tensors of these keys in parts instead.
        """
        self._layouts = [sample.layout for sample in samples]
        if keys := held_apart(layout.tree for layout in self._layouts) - self.memory.apart:
            return [keys] * self.size
        self._odd = find_odd(samples, self.memory.replicas, str(self.options.check_replicas))
        for rank, row in (holder for rows in self._odd for holder in rows):
            self._asked[rank].append(row)
        return self._asked if self._odd else self._planned()

    def judge(self, samples: Sequence[Words]) -> list[Planned]:
        """Plan the writes of each rank even though samples differ. Raises InvalidInput if they differ too much."""
        words = [dict(zip(rows, sampled, strict=True)) for rows, sampled in zip(self._asked, samples, strict=True)]
        self._differing = judged(self._layouts, self._odd, words, self.memory.replicas)
        return self._planned()

    def _planned(self) -> list[Planned]:
        check = str(self.options.check_replicas)
        whole = {} if check == "raise" else {**self.memory.replicas.differing, **self._differing}
        plan = plan_writes(self._layouts, check, whole)
        self._streams = plan.streams
        offer = self.reuse_offer(plan.streams).for_ranks(self.repo)
        self.memory.plan = plan  # set last: no error can follow, so all ranks use the plan
        number = self.memory.plan_number + 1
        return [(Assignment(number, *own), offer) for own in zip(plan.ranges, plan.sets, strict=True)]

    def finish(self, parts: Sequence[RankPart]) -> list[tuple[Committed, WornBlobs]]:
        """Commit. Return the record for each rank, with the worn blobs of the rank's share."""
        tree = parts[0].tree if self.memory.plan is None else self.memory.plan.tree
        record, worn = self.conclude(parts, self._streams, tree)
        return [(record, worn & {(ref.uploader, ref.hash) for ref in part.share.refs}) for part in parts]

    def conclude(
        self, parts: Sequence[RankPart], streams: Streams, tree: bytes, notes: Mapping[str, bytes] | None = None
    ) -> tuple[Committed, WornBlobs]:
        """Check that every tensor is complete, put the manifest, and commit. Return the record and the worn blobs.

        ``notes``: see `casckpt.format.manifest.Draft`.
        """
        if self._transaction is None:
            raise InvalidInput("a save was finished before it began; this is a bug in casckpt")
        whole = merge([part.share for part in parts], streams, self.repo.marker.cell_bytes)
        lineage = {name: plain.encode(value) for name, value in (self.options.lineage or {}).items()}
        notes = {**(notes or {}), **lineage, **self._replica_note(whole, parts)}
        record, worn = self._put_manifest(self._transaction.txid, whole, parts, tree, notes)
        sign_save(self.repo, record.manifest)
        self._transaction.commit(record)
        if self.size > 1:
            self._remember_replicas(streams)
        self._forget_replaced()
        log_pickled(self.repo.storage.url, record.run, (entry for part in parts for entry in part.objects))
        return record, worn

    def _replica_note(self, whole: Share, parts: Sequence[RankPart]) -> dict[str, bytes]:
        """Compare the cells that ranks reread. Return the note with all keys that differ across ranks."""
        if self.memory.plan is not None:
            self._mixed = differing_cells(self.memory.plan, whole, [part.reread for part in parts])
        self._differing |= self._mixed | self.memory.replicas.found
        if not (known := self.memory.replicas.differing | self._differing):
            return {}
        keys = {name[1] for name in whole.extents} | {entry.key for part in parts for entry in part.objects}
        differing = sorted(keys & known.keys())
        return {REPLICAS_NOTE: plain.encode(differing)} if differing else {}

    def _remember_replicas(self, streams: Streams) -> None:
        """Remember the saved tensors, and log those that differ across ranks."""
        memory = self.memory.replicas
        memory.saved.update(name[1] for name in streams)
        memory.found.clear()
        new = [key for key in self._differing if key not in memory.differing]
        if new:
            mixed = _MIXED % _quoted(self._mixed) if self._mixed else ""
            log.warning(_DIFFER, self.options.run, self.options.step, _quoted(new), mixed)
            memory.differing |= self._differing
        if self._mixed:
            self.memory.plan = None  # in the next save, one rank writes them

    def _put_manifest(
        self, txid: TxId, whole: Share, parts: Sequence[RankPart], tree: bytes, notes: dict[str, bytes]
    ) -> tuple[Committed, WornBlobs]:
        """Put the manifest. Return the record to commit, and the blobs that are marked as worn in the manifest."""
        refs = mark_worn(whole.extents, whole.refs, self.options.run, self._may_live)
        raw, short = encode_metadata(self.options.metadata or {})
        draft = Draft(
            casckpt=__version__,
            torch=str(torch.__version__),
            run=self.options.run,
            step=self.options.step,
            created_at=self.repo.clock(),
            parent=None if self._parent is None else self._parent.id,
            world_size=self.size,
            cell_bytes=self.repo.marker.cell_bytes,
            metadata=raw,
            blobs=refs,
            streams=whole.extents,
            unhashed=whole.unhashed,
            objects=[entry for part in parts for entry in part.objects],
            attachments=[attachment for part in parts for attachment in part.attachments],
            tree=tree,
            notes=notes,
            health=self._health(whole, parts),
        )
        with collector_paused():
            made = manifests.put(self.repo, txid, draft)
        worn = frozenset((ref.uploader, ref.hash) for ref in refs if ref.worn)
        return self._record(txid, draft, whole, made, short), worn

    def _health(self, whole: Share, parts: Sequence[RankPart]) -> dict[int, Rows] | None:
        if not self.options.health:
            return None
        return health_of_all(whole.extents, [part.health for part in parts], self._parent_health)

    def _record(
        self, txid: TxId, draft: Draft, whole: Share, made: Encoded, metadata: dict[str, Any] | None
    ) -> Committed:
        """Return the record to commit, with the totals of all ranks."""
        single, others = whole.extents.cells, whole.extents.others
        tables = [table for number, table in others.items() if whole.extents.names[number][0] == TENSOR]
        total = int(single.nbytes.sum()) + sum(prod(table.shape) * table.itemsize for table in tables)
        new = {number: ref.size for number, ref in enumerate(draft.blobs) if ref.uploader == txid}
        health = None if draft.health is None else summed_health(draft.streams, draft.health)
        lineage = lineage_of(draft.notes)
        return Committed(
            txid=txid,
            run=draft.run,
            step=draft.step,
            time=draft.created_at,
            manifest=made.id,
            head=made.head,
            manifest_bytes=len(made.data),
            created_at=draft.created_at,
            store=self.repo.marker.store_id,
            who=self.repo.who,
            bytes_total=total,
            bytes_written=sum(new.values()),
            bytes_reused=total - bytes_in(whole.extents, new),
            **coded_bytes(others.values())._asdict(),
            blobs_written=len(new),
            blobs_reused=len(draft.blobs) - len(new),
            seconds=round(max(0, self.repo.clock() - self._started) / 1e6, 6),
            tensors=int(single.is_whole.sum()) + len(tables),
            ephemeral=self.options.ephemeral,
            parent=draft.parent,
            metadata=metadata,
            healthy=self._healthy(health),
            health=health,
            metrics=stored_metrics(self.options.metrics, []),
            lineage=encode_metadata(lineage)[1] or dict.fromkeys(lineage) or None,
        )

    def _healthy(self, health: Health | None) -> bool | None:
        """Return the user's verdict. Without one, return False if the state holds any NaN.

        Infinities may be intended, for example in masks.
        """
        verdict = self.options.healthy
        if health is None or not health.nan:
            return verdict
        where = f"{self.options.run}@{self.options.step} holds NaN ({health.nan} elements; in {', '.join(health.keys)})"
        log.warning("%s%s", where, ": it is saved as unhealthy" * (verdict is None))
        return False if verdict is None else verdict

    def _may_live(self, uploader: TxId) -> bool:
        """Return whether the checkpoint of an uploader is live. Return True if its log cannot be read."""
        try:
            commit = read_log(self.repo, uploader)
        except (Damaged, Refused):
            return True
        return commit is not None and commit.live

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort the transaction after an error in the context."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """Abort the transaction if it has begun but is not committed."""
        if self._differing:
            self.memory.plan = None  # the differences are not noted, so the next save must find them again
        if self._transaction is not None:
            self._transaction.abort(error)

    def _forget_replaced(self) -> None:
        """Forget the checkpoint that the new one replaces.

        The new checkpoint is already visible, so errors are only logged.
        """
        for old in self._replaced:
            try:
                forget(self.repo, old)
            except CasckptError as error:
                log.warning("%s was superseded, but not forgotten: %s", old, error)


def _quoted(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys))


def late_offer(repo: Repository, streams: Streams, options: SaveOptions) -> ReuseOffer:
    """Return the offer for a rank that did not receive one from rank 0.

    Call this after rank 0 has begun the transaction.
    """
    parent = newest_reusable(repo, options.run, anew=True)
    offer = make_offer(repo, parent, streams, run=options.run)
    unscanned = ParentHealth.of_commit(repo, parent).unknown if options.health else None
    return replace(offer, compress=compress_of(None, repo.settings.compress), unscanned=unscanned)


def _check_agreed(requests: Sequence[BeginRequest]) -> None:
    first = requests[0].call
    for rank, request in enumerate(requests):
        if request.call != first:
            raise InvalidInput(
                f"rank {rank} saves {request.call}, but rank 0 saves {first}; every rank must make the same call",
                rank=rank,
            )


def _agree(requests: Sequence[BeginRequest]) -> bool:
    """Return whether all ranks of each set sent the same digest."""
    first: dict[int, bytes] = {}
    return all(
        first.setdefault(number, digest) == digest for request in requests for number, digest in request.sets.items()
    )


_NAMED: Final = 8


def log_pickled(url: str, run: str, objects: Iterable[ObjectEntry]) -> None:
    """Log the names of the pickles in ``objects``, once for each name in a run."""
    if keys := sorted({entry.key for entry in objects if entry.pickled and is_news(url, run, entry.key)}):
        log.warning(
            "%s in %s: stored as pickles: %s. They are not plain data, or they are bytes that a planner produced. To "
            "load classes that torch's restricted unpickler does not allow, a load needs allow_pickle=True. This is "
            "logged once", run, url, listed(keys, _NAMED),
        )  # fmt: skip
