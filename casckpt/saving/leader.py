"""Rank 0 in a save: it begins, plans and commits what all ranks stored, by the protocol of docs/format.md."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import torch

from casckpt._version import __version__
from casckpt.base.cycle_collector import collector_paused
from casckpt.base.text import listed
from casckpt.contents import manifests
from casckpt.contents.signatures import sign_save
from casckpt.errors import CasckptError, Damaged, InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.draft import Attachment, Draft, Encoded, ObjectEntry
from casckpt.format.metrics import stored_metrics
from casckpt.format.names import BlobHash, TxId
from casckpt.format.records import Committed, Health
from casckpt.format.sections.health import Rows
from casckpt.format.sections.index import REPLICAS_NOTE, TENSOR
from casckpt.format.sections.metadata import encode_metadata
from casckpt.history.commits import Commit, forget, read_log
from casckpt.history.transactions import Transaction, begin_save
from casckpt.plan.reuse import bytes_in, coded_bytes, mark_worn
from casckpt.plan.writers import Words, WriteRanges
from casckpt.ranks.agreement import StoreIdentity
from casckpt.repository.repository import Repository
from casckpt.saving.health import Parent, health_of_all, summed_health
from casckpt.saving.health_scan import ScanReport
from casckpt.saving.layout import RankLayout, WritePlan, plan_writes
from casckpt.saving.options import SaveOptions, usable_compress
from casckpt.saving.replicas import (
    Compared,
    Odd,
    ReplicaMemory,
    Samples,
    differing_cells,
    find_odd,
    judged,
)
from casckpt.saving.reuse_offer import LastShare, ReuseOffer, reusable
from casckpt.saving.shares import Share, Streams, merge

log = logging.getLogger(__name__)

_DIFFER = (
    "%s@%d: ranks hold different values of %s. The checkpoint has those of one rank, the lowest that "
    "holds each unless a front end chose another, and all ranks load them.%s Synchronise them before the save "
    "(torch.nn.SyncBatchNorm for batch norms), or save what belongs to one rank as casckpt.PerRank. This is logged "
    "once for each name"
)
_MIXED = " Of %s, parts of several ranks were written before the difference was found; later saves write one rank's."


@dataclass
class GroupMemory:
    """What a rank keeps between the saves of one process group, so that the next one talks little."""

    replicas: ReplicaMemory = field(default_factory=ReplicaMemory)
    compared: Compared = field(default_factory=Compared)
    plan: WritePlan | None = None  # rank 0 only
    fingerprint: str = ""
    duty: WriteRanges | None = None
    plan_number: int = 0
    remembered: dict[str, LastShare] = field(default_factory=dict)


@dataclass(frozen=True)
class BeginRequest:
    """What every rank says first. ``sets``: a digest of samples for each set of ranks that it shares rows with."""

    run: str
    step: int
    dedup: str
    fingerprint: str
    plan_number: int
    remembered: TxId | None
    streams: Streams | None  # only of a rank that is alone
    check: str | bool
    sets: Mapping[int, bytes]


@dataclass(frozen=True)
class BeginAnswer:
    """What every rank is told first. ``knowledge`` is None if the layouts changed: it comes with the new plan."""

    txid: TxId
    home: StoreIdentity
    knowledge: ReuseOffer | None


@dataclass(frozen=True)
class Planned:
    """The part of a new plan that one rank needs."""

    number: int
    duty: WriteRanges
    knowledge: ReuseOffer
    sets: Words


@dataclass(frozen=True)
class FinishRequest:
    """What every rank says when its part is durable."""

    share: Share
    objects: Sequence[ObjectEntry]
    attachments: Sequence[Attachment]
    tree: bytes | None  # only of a rank that is alone
    health: ScanReport
    again: tuple[int, Words] | None = None  # of `Compared.read_again`


@dataclass(frozen=True)
class FinishAnswer:
    """What every rank is told last."""

    record: Committed
    worn: frozenset[tuple[TxId, BlobHash]]


class Leader:
    """Rank 0 of one attempt."""

    def __init__(self, repo: Repository, size: int, memory: GroupMemory, options: SaveOptions, *, reuse: bool) -> None:
        self.repo, self.size, self.memory, self.options, self.reuse = repo, size, memory, options, reuse
        self._started = repo.clock()
        self._transaction: Transaction | None = None
        self._parent: Commit | None = None
        self._told = Parent(None)
        self._replaced: list[Commit] = []
        self._streams: Streams = {}
        self._layouts: Sequence[RankLayout] = ()
        self._odd: Odd = ()
        self._asked: list[list[int]] = [[] for _ in range(size)]
        self._differing: dict[str, None] = {}
        self._mixed: dict[str, None] = {}

    def start(self) -> TxId:
        """Begin the transaction, and find the parent. Raises Conflict if the step exists and is not overwritten."""
        encode_metadata(self.options.metadata or {})  # refused before anything is written
        run, step, overwrite = self.options.run, self.options.step, self.options.overwrite
        self._transaction, self._parent, self._replaced = begin_save(self.repo, run, step, overwrite=overwrite)
        return self._transaction.txid

    def begin(self, hellos: Sequence[BeginRequest]) -> list[BeginAnswer]:
        """`start`, and what the ranks are to know for it."""
        self._check_agreed(hellos)
        txid, home = self.start(), StoreIdentity.of(self.repo)
        if self.size == 1:
            self._streams = hellos[0].streams or {}
            return [BeginAnswer(txid, home, self.knowledge(self._streams))]
        plan = self.memory.plan
        is_old = plan is None or plan.fingerprints != tuple(hello.fingerprint for hello in hellos)
        is_old = is_old or any(hello.plan_number != self.memory.plan_number for hello in hellos)
        if plan is None or is_old or plan.check != self.options.check_replicas or not _agree(hellos):
            return [BeginAnswer(txid, home, None)] * self.size
        self._streams = plan.streams
        known = self.knowledge(plan.streams).to_tell(self.repo, {hello.remembered for hello in hellos})
        return [BeginAnswer(txid, home, known)] * self.size

    def plan(self, samples: Sequence[Samples]) -> Sequence[Planned | list[int]]:
        """Plan who writes what, where layouts are new or samples differ; or ask for more samples of some rows."""
        self._layouts = [one.layout for one in samples]
        self._odd = find_odd(samples, self.memory.replicas, str(self.options.check_replicas))
        for rank, row in (holder for rows in self._odd for holder in rows):
            self._asked[rank].append(row)
        return self._asked if self._odd else self._planned()

    def judge(self, samples: Sequence[Words]) -> list[Planned]:
        """Plan who writes what, where samples differ. Raises InvalidInput for what may not be saved."""
        words = [dict(zip(rows, mine, strict=True)) for rows, mine in zip(self._asked, samples, strict=True)]
        self._differing = judged(self._layouts, self._odd, words, self.memory.replicas)
        return self._planned()

    def _planned(self) -> list[Planned]:
        check = str(self.options.check_replicas)
        whole = {} if check == "raise" else {**self.memory.replicas.differing, **self._differing}
        plan = plan_writes(self._layouts, check, whole)
        self._streams = plan.streams
        knowledge = self.knowledge(plan.streams).to_tell(self.repo)
        self.memory.plan = plan  # not before nothing can fail: it counts as told from now on
        number = self.memory.plan_number + 1
        parts = zip(plan.duties, plan.sets, strict=True)
        return [Planned(number, duty, knowledge, sets) for duty, sets in parts]

    def finish(self, stored: Sequence[FinishRequest]) -> list[FinishAnswer]:
        """Steps 4 and 5, with what `begin` and `plan` found out."""
        tree = stored[0].tree if self.memory.plan is None else self.memory.plan.tree
        return self.conclude(stored, self._streams, tree or b"")

    def conclude(
        self, stored: Sequence[FinishRequest], streams: Streams, tree: bytes, notes: Mapping[str, bytes] | None = None
    ) -> list[FinishAnswer]:
        """Prove that every tensor is whole, put the manifest, commit. ``notes``: see `ManifestBody`."""
        if self._transaction is None:
            raise InvalidInput("a save was finished that had not begun; this is a bug of casckpt")
        described = merge([request.share for request in stored], streams, self.repo.marker.cell_bytes)
        notes = {**(notes or {}), **self._replica_note(described, stored)}
        record, worn = self._put_manifest(self._transaction.txid, described, stored, tree, notes)
        sign_save(self.repo, record.manifest)
        self._transaction.commit(record)
        if self.size > 1:
            self._remember_replicas(streams)
        self._forget_replaced()
        say_pickled(self.repo.storage.url, record.run, (entry for request in stored for entry in request.objects))
        return [
            FinishAnswer(
                record, frozenset((r.uploader, r.hash) for r in request.share.refs if (r.uploader, r.hash) in worn)
            )
            for request in stored
        ]

    def _replica_note(self, described: Share, stored: Sequence[FinishRequest]) -> dict[str, bytes]:
        """Compare the cells that ranks read again; return the note of all keys that ranks did not hold alike."""
        if self.memory.plan is not None:
            self._mixed = differing_cells(self.memory.plan, described, [one.again for one in stored])
        self._differing |= self._mixed | self.memory.replicas.found
        keys = {name[1] for name in described.extents} | {one.key for rank in stored for one in rank.objects}
        differing = sorted(keys & (self.memory.replicas.differing | self._differing).keys())
        return {REPLICAS_NOTE: plain.encode(differing)} if differing else {}

    def _remember_replicas(self, streams: Streams) -> None:
        """Note what was saved, and log what ranks did not hold alike."""
        memory = self.memory.replicas
        memory.saved.update(name[1] for name in streams)
        memory.found.clear()
        new = [key for key in self._differing if key not in memory.differing]
        if new:
            mixed = _MIXED % _quoted(self._mixed) if self._mixed else ""
            log.warning(_DIFFER, self.options.run, self.options.step, _quoted(new), mixed)
            memory.differing |= self._differing
        if self._mixed:
            self.memory.plan = None  # the next one has one rank write them

    def _check_agreed(self, hellos: Sequence[BeginRequest]) -> None:
        for rank, hello in enumerate(hellos):
            mine, first = (
                f"{one.run}@{one.step} (dedup={one.dedup!r}, check_replicas={one.check!r})"
                for one in (hello, hellos[0])
            )
            if mine != first:
                raise InvalidInput(
                    f"rank {rank} saves {mine}, but rank 0 saves {first}; all ranks must make the same call", rank=rank
                )

    def knowledge(self, streams: Streams) -> ReuseOffer:
        """What these streams may be found in; nothing in the retry of a save that was revoked, which uploads all."""
        known = ReuseOffer()
        if self.reuse:
            known = reusable(self.repo, self._parent, streams, run=self.options.run, dedup=self.options.dedup)
        setting = None if self._transaction is None else self._transaction.settings.compress
        known = replace(known, compress=usable_compress(self.options.compress or setting or "off"))
        if self.options.health:
            self._told = Parent.of_commit(self.repo, self._parent if self.reuse else None)
            known = replace(known, unlooked=self._told.unknown)
        return known

    def _put_manifest(
        self, txid: TxId, described: Share, stored: Sequence[FinishRequest], tree: bytes, notes: dict[str, bytes]
    ) -> tuple[Committed, set[tuple[TxId, BlobHash]]]:
        """Upload the manifest; the record that will make it visible, and the blobs that it marks as worn."""
        refs = mark_worn(described.tables(), described.refs, self.options.run, self._lives)
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
            streams=described.extents,
            unhashed=described.unhashed,
            objects=[one for rank in stored for one in rank.objects],
            attachments=[one for rank in stored for one in rank.attachments],
            tree=tree,
            notes=notes,
            health=self._health(described, stored),
        )
        with collector_paused():
            made = manifests.put(self.repo, txid, draft)
        return self._record(txid, draft, made, short), {(ref.uploader, ref.hash) for ref in refs if ref.worn}

    def _health(self, described: Share, stored: Sequence[FinishRequest]) -> dict[int, Rows] | None:
        if not self.options.health:
            return None
        return health_of_all(described.extents, [one.health for one in stored], self._told)

    def _record(self, txid: TxId, draft: Draft, made: Encoded, metadata: dict[str, Any] | None) -> Committed:
        """What is committed, with the figures of the save over all ranks."""
        tables = [table for name, (_, table) in draft.streams.items() if name[0] == TENSOR]
        tensors = [prod(table.shape) * table.itemsize for table in tables]
        new = {number: ref.size for number, ref in enumerate(draft.blobs) if ref.uploader == txid}
        health = None if draft.health is None else summed_health(draft.streams, draft.health)
        return Committed(
            txid=txid,
            run=draft.run,
            step=draft.step,
            time=draft.created_at,
            manifest=made.id,
            head=made.head,
            manifest_bytes=len(made.data),
            created_at=draft.created_at,
            bytes_total=sum(tensors),
            bytes_written=sum(new.values()),
            bytes_reused=sum(tensors) - bytes_in(tables, new),
            **coded_bytes(table for _, table in draft.streams.values())._asdict(),
            blobs_written=len(new),
            blobs_reused=len(draft.blobs) - len(new),
            seconds=round((self.repo.clock() - self._started) / 1e6, 6),
            tensors=len(tensors),
            ephemeral=self.options.ephemeral,
            parent=draft.parent,
            metadata=metadata,
            healthy=self._healthy(health),
            health=health,
            metrics=stored_metrics(self.options.metrics),
        )

    def _healthy(self, health: Health | None) -> bool | None:
        """The user's word; where he gave none, False if there is any NaN. Infinities may be meant, as in masks."""
        word = self.options.healthy
        if health is None or not health.nan:
            return word
        where = f"{self.options.run}@{self.options.step} holds NaN ({health.nan} elements; in {', '.join(health.keys)})"
        log.warning("%s%s", where, ": it is saved as unhealthy" * (word is None))
        return False if word is None else word

    def _lives(self, uploader: TxId) -> bool:
        """Does the checkpoint that uploaded a blob of another run live? Where that cannot be read, it may."""
        try:
            commit = read_log(self.repo, uploader)
        except (Damaged, Refused):
            return True
        return commit is not None and commit.live

    def abort(self, error: BaseException) -> None:
        """Give the transaction up, if it has begun and was not committed."""
        if self._differing:
            self.memory.plan = None  # what was found is not noted: the next save is to find it again
        if self._transaction is not None:
            self._transaction.abort(error)

    def _forget_replaced(self) -> None:
        """Forget what the new checkpoint replaces; it is visible by now, so what fails here is left as it is."""
        for old in self._replaced:
            try:
                forget(self.repo, old)
            except CasckptError as error:
                log.warning("%s was superseded, but not forgotten: %s", old, error)


def _quoted(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys))


def _agree(hellos: Sequence[BeginRequest]) -> bool:
    """Whether all ranks of each set have the same digest of it."""
    first: dict[int, bytes] = {}
    return all(first.setdefault(number, one) == one for hello in hellos for number, one in hello.sets.items())


_NAMED: Final = 8
_said: Final[set[tuple[str, str, str]]] = set()  # in this process


def say_pickled(url: str, run: str, objects: Iterable[ObjectEntry]) -> None:
    """Name those of ``objects`` in the log that are pickles, and were not named of this run before."""
    new = {(url, run, one.key) for one in objects if one.pickled} - _said
    if not new:
        return
    _said.update(new)
    keys = sorted(key for _, _, key in new)
    log.warning(
        "%s in %s: stored as pickles: %s. They are no plain data, or bytes that a planner made; a load needs "
        "allow_pickle=True for what torch's restricted unpickler does not know. This is said once",
        run,
        url,
        listed(keys, _NAMED),
    )
