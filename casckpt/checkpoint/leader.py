"""What rank 0 does in a save: begin, plan, and commit what all ranks stored. The protocol is that of docs/format.md."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from casckpt._version import __version__
from casckpt.checkpoint.asked import Home
from casckpt.checkpoint.describe import Described, Share, Streams, mark_worn, merge
from casckpt.checkpoint.known import Knowledge, Remembered, Sources, nothing_known
from casckpt.checkpoint.layout import Layout, WritePlan, plan_writes
from casckpt.checkpoint.pickled import say_pickled
from casckpt.errors import CasckptError, Conflict, InvalidInput, StorageError
from casckpt.format.keys import commit_key
from casckpt.format.manifest import TENSOR, Attachment, BlobRef, Body, ObjectEntry, encode_metadata, packed_blobs
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.records import FORMAT_VERSION, Committed, FirstRecord
from casckpt.plan.progress import Progress, silent
from casckpt.plan.reuse import KnownCells
from casckpt.plan.writers import Duty
from casckpt.repository import manifests
from casckpt.repository.commits import Commit, CommitList, commit, forget, list_commits
from casckpt.repository.repository import Repository
from casckpt.repository.transactions import Transaction, begin

log = logging.getLogger(__name__)

_MADE_AGAIN = "the store at %s is gone, with its checkpoints (deleted? unmounted?); this save makes a new one there"


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What a save was asked for. ``dedup``: "store" or "run". ``threads``: that work on it at the same time."""

    run: str
    step: int
    metadata: Mapping[str, Any]
    overwrite: bool
    ephemeral: bool
    dedup: str
    threads: int
    torch_version: str
    check_replicas: bool = False
    progress: Progress = silent


@dataclass
class SaveMemory:
    """What a rank keeps between the saves of one process group, so that the next one talks little."""

    plan: WritePlan | None = None  # rank 0 only
    fingerprint: str = ""
    duty: Duty | None = None
    plan_number: int = 0
    remembered: dict[str, Remembered] = field(default_factory=dict)


@dataclass(frozen=True)
class Hello:
    """What every rank says first."""

    run: str
    step: int
    dedup: str
    fingerprint: str
    plan_number: int
    remembered: TxId | None
    streams: Streams | None  # only of a rank that is alone


@dataclass(frozen=True)
class Start:
    """What every rank is told first. ``knowledge`` is None if the layouts changed: it comes with the new plan."""

    txid: TxId
    home: Home
    knowledge: Knowledge | None
    known: KnownCells | None = None  # only for a rank that is alone


@dataclass(frozen=True)
class Planned:
    """The part of a new plan that one rank needs."""

    number: int
    duty: Duty
    knowledge: Knowledge


@dataclass(frozen=True)
class Stored:
    """What every rank says when its part is durable."""

    share: Share
    objects: Sequence[ObjectEntry]
    attachments: Sequence[Attachment]
    tree: bytes | None  # only of a rank that is alone
    digests: Sequence[bytes] | None


@dataclass(frozen=True)
class Done:
    """What every rank is told last."""

    record: Committed
    worn: frozenset[tuple[TxId, BlobHash]]


class Leader:
    """Rank 0 of one attempt."""

    def __init__(self, repo: Repository, size: int, memory: SaveMemory, options: SaveOptions, *, reuse: bool) -> None:
        self.repo, self.size, self.memory, self.options, self.reuse = repo, size, memory, options, reuse
        self._started = repo.clock()
        self._transaction: Transaction | None = None
        self._commits = CommitList({}, {})
        self._replaced: list[Commit] = []
        self._committed = False
        self._streams: Streams = {}

    def start(self) -> TxId:
        """Steps 1 and 2: only after the transaction has begun are commits listed. This order is what makes gc safe."""
        encode_metadata(self.options.metadata)  # refused before anything is written
        made = not self.repo.exists() and self.repo.create()
        earlier = list_commits(self.repo)
        if not made and not earlier.commits:  # an emptied folder has no marker either, and nobody would find this save
            known = self.repo.marker
            if self.repo.create(cell_bytes=known.cell_bytes, blob_bytes=known.blob_bytes):
                log.warning(_MADE_AGAIN, self.repo.storage.url)
        self._replaced = self._existing(earlier)
        after = [one.txid for one in earlier.commits.values()]
        self._transaction = begin(self.repo, self.options.run, self.options.step, after=after)
        self._commits = list_commits(self.repo)
        return self._transaction.txid

    def begin(self, hellos: Sequence[Hello]) -> list[Start]:
        """`start`, and what the ranks are to know for it."""
        self._check_agreed(hellos)
        txid, home = self.start(), Home.of(self.repo)
        if self.size == 1:
            self._streams = hellos[0].streams or {}
            return [Start(txid, home, None, self.sources(self._streams).known() if self.reuse else nothing_known())]
        plan = self.memory.plan
        planned = plan is not None and plan.fingerprints == tuple(hello.fingerprint for hello in hellos)
        if plan is None or not planned or any(hello.plan_number != self.memory.plan_number for hello in hellos):
            return [Start(txid, home, None)] * self.size
        self._streams = plan.streams
        return [Start(txid, home, self._knowledge({hello.remembered for hello in hellos}))] * self.size

    def plan(self, layouts: Sequence[Layout]) -> list[Planned]:
        """Who writes what, where the layouts are new."""
        plan = plan_writes(layouts)
        self._streams = plan.streams
        knowledge = self._knowledge(set())
        self.memory.plan = plan  # not before nothing can fail: it counts as told from now on
        return [Planned(self.memory.plan_number + 1, duty, knowledge) for duty in plan.duties]

    def finish(self, stored: Sequence[Stored]) -> list[Done]:
        """Steps 4 and 5, with what `begin` and `plan` found out."""
        if self.options.check_replicas and self.memory.plan is not None:
            check_replicas(self.memory.plan.layouts, [one.digests or () for one in stored])
        tree = stored[0].tree if self.size == 1 or self.memory.plan is None else self.memory.plan.tree
        return self.conclude(stored, self._streams, tree or b"")

    def conclude(
        self, stored: Sequence[Stored], streams: Streams, tree: bytes, notes: Mapping[str, bytes] | None = None
    ) -> list[Done]:
        """Prove that every tensor is whole, put the manifest, commit. ``notes``: see `casckpt.format.manifest.Body`."""
        if self._transaction is None:
            raise InvalidInput("a save was finished that had not begun; this is a bug of casckpt")
        described = merge([one.share for one in stored], streams, self.repo.marker.cell_bytes)
        record, worn = self._put_manifest(self._transaction.txid, described, stored, tree, dict(notes or {}))
        self._commit(self._transaction, record)
        self._close(self._transaction)
        say_pickled(self.repo.storage.url, record.run, (entry for one in stored for entry in one.objects))
        return [
            Done(record, frozenset((r.uploader, r.hash) for r in one.share.refs if (r.uploader, r.hash) in worn))
            for one in stored
        ]

    def _check_agreed(self, hellos: Sequence[Hello]) -> None:
        for rank, hello in enumerate(hellos):
            if (hello.run, hello.step, hello.dedup) != (hellos[0].run, hellos[0].step, hellos[0].dedup):
                raise InvalidInput(
                    f"rank {rank} saves {hello.run}@{hello.step} (dedup={hello.dedup!r}), but rank 0 saves "
                    f"{hellos[0].run}@{hellos[0].step} (dedup={hellos[0].dedup!r}); all ranks must make the same call",
                    rank=rank,
                )

    def _existing(self, commits: CommitList) -> list[Commit]:
        """The visible commits of this run and step: what an overwrite replaces."""
        run, step = self.options.run, self.options.step
        found = [one for one in commits.visible() if (one.run, one.step) == (run, step)]
        if found and not self.options.overwrite:
            raise Conflict(
                f"{run}@{step} exists already ({found[-1].id}); save another step, or overwrite it "
                "(overwrite=True, --overwrite)",
                checkpoints=(found[-1].id,),
            )
        return found

    def sources(self, streams: Streams) -> Sources:
        """The manifests that these streams may be found in."""
        return Sources(self.repo, self._commits, streams, run=self.options.run, dedup=self.options.dedup)

    def _knowledge(self, remembered: set[TxId | None]) -> Knowledge:
        if not self.reuse:
            return Knowledge(None, (), frozenset())
        sources = self.sources(self._streams)
        if sources.parent is not None and sources.are_remembered(remembered):
            return Knowledge(sources.parent.id, None, sources.damaged)
        return sources.knowledge()

    def _put_manifest(
        self, txid: TxId, described: Described, stored: Sequence[Stored], tree: bytes, notes: dict[str, bytes]
    ) -> tuple[Committed, set[tuple[TxId, BlobHash]]]:
        """Upload the manifest; the record that will make it visible, and the blobs that it marks as worn."""
        live = frozenset(one.txid for one in self._commits.live())
        refs = mark_worn(described, self.options.run, live | {txid})
        blobs, places = packed_blobs(refs)
        raw, short = encode_metadata(self.options.metadata)
        parent = self._commits.newest_live(self.options.run)
        body = Body(
            format=FORMAT_VERSION,
            casckpt=__version__,
            torch=self.options.torch_version,
            run=self.options.run,
            step=self.options.step,
            created_at=self.repo.clock(),
            parent=None if parent is None else parent.id,
            world_size=self.size,
            cell_bytes=self.repo.marker.cell_bytes,
            metadata=raw,
            blobs=blobs,
            entries=described.entries(),
            objects=[one for rank in stored for one in rank.objects],
            attachments=[one for rank in stored for one in rank.attachments],
            tree=tree,
            notes=notes,
        )
        record = self._record(txid, body, manifests.put(self.repo, txid, body, places), refs, short)
        return record, {(ref.uploader, ref.hash) for ref in refs if ref.worn}

    def _record(
        self, txid: TxId, body: Body, id: ManifestId, refs: Sequence[BlobRef], metadata: dict[str, Any] | None
    ) -> Committed:
        """What is committed, with the figures of the save over all ranks."""
        tensors = [entry.nbytes for entry in body.entries if entry.kind == TENSOR]
        new = [ref.size for ref in refs if ref.uploader == txid]
        return Committed(
            txid=txid,
            run=body.run,
            step=body.step,
            time=body.created_at,
            manifest=id,
            uploader=txid,
            created_at=body.created_at,
            bytes_total=sum(tensors),
            bytes_written=sum(new),
            bytes_reused=max(0, sum(tensors) - sum(new)),
            blobs_written=len(new),
            blobs_reused=len(refs) - len(new),
            seconds=round((self.repo.clock() - self._started) / 1e6, 6),
            tensors=len(tensors),
            ephemeral=self.options.ephemeral,
            parent=body.parent,
            metadata=metadata,
        )

    def _commit(self, transaction: Transaction, record: Committed) -> None:
        try:
            commit(self.repo, record)
        except StorageError as error:
            # The answer may be lost, not the record: revoking races for the same name, so now one of them stands.
            transaction.abort(f"{type(error).__name__}: {error}"[:1000])
            if not self._is_committed(transaction.txid):
                raise

    def _is_committed(self, txid: TxId) -> bool:
        try:
            return isinstance(self.repo.get_record(commit_key(txid), FirstRecord), Committed)
        except CasckptError:
            return False

    def abort(self, error: BaseException) -> None:
        """Give the transaction up, if it has begun and was not committed."""
        if self._transaction is not None and not self._committed:
            self._transaction.abort(f"{type(error).__name__}: {error}"[:1000])

    def _close(self, transaction: Transaction) -> None:
        """The checkpoint is visible by now: what fails here is left to others, or to gc."""
        self._committed = True
        try:
            transaction.close()
        except CasckptError as error:
            log.warning("files of transaction %s are left to gc: %s", transaction.txid, error)
        for old in self._replaced:
            try:
                forget(self.repo, old)
            except CasckptError as error:
                log.warning("%s was superseded, but not forgotten: %s", old, error)


def check_replicas(layouts: Sequence[Layout], digests: Sequence[Sequence[bytes]]) -> None:
    """Raise InvalidInput, naming key and ranks, where holders of one region hold other bytes. Digests are by row."""
    seen: dict[tuple[int, int], tuple[int, bytes]] = {}
    for rank, (layout, mine) in enumerate(zip(layouts, digests, strict=True)):
        for row, digest in enumerate(mine):
            where = (int(layout.held.name[row]), int(layout.held.region[row]))
            other, known = seen.setdefault(where, (rank, digest))
            if known != digest:
                key = layout.streams[layout.row_stream[row]][0][1]
                raise InvalidInput(
                    f"{key!r} differs between ranks {other} and {rank}, which should hold the same; nothing was saved",
                    key=key,
                    rank=rank,
                )
