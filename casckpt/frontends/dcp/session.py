"""A save through DCP on one rank. The storage writer's hooks call the session's methods in the order of definition.

The coordinator begins the transaction before it sends the plans. As a result, every rank chooses reusable cells and
uploads only after the transaction has begun, as gc requires. The plans carry the reuse offer to the ranks. With DCP's
cached plans, a rank receives an old plan, which lacks the random number from the rank's local plan. The rank then
computes the offer itself.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import local
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from casckpt.base.progress import Progress
from casckpt.errors import InvalidInput, RankFailed
from casckpt.format.names import TxId
from casckpt.format.sections.index import TENSOR, Name
from casckpt.format.sections.tables import Streams
from casckpt.format.tree import OBJECT, Node, merge
from casckpt.format.tree import TENSOR as TENSOR_LEAF
from casckpt.frontends.dcp.items import Resolver, Tensors, Values, is_whole, sources_of, tensors_of, values_of
from casckpt.frontends.dcp.schema import Note, Opaque, check_keys, path_of, schema_of, tree_of
from casckpt.ranks.agreement import StoreIdentity
from casckpt.repository.repository import Repository
from casckpt.saving.leader import GroupMemory, Leader, late_offer
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, frozen_by, prepare, tensor_source
from casckpt.saving.rank_part import RankPart, write_part
from casckpt.saving.replicas import Samples, compare, memory_of, samples_of
from casckpt.saving.reuse_offer import ReuseOffer, reusable_cells
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.state import check_key, decode_tree, encode_tree


@dataclass(frozen=True)
class LocalStorageData:
    """The data that a rank puts into its local plan: a random number for this save."""

    number: bytes


@dataclass(frozen=True)
class GlobalStorageData:
    """The data that the coordinator puts into a rank's plan. ``number``: the number in that rank's local plan."""

    number: bytes
    txid: TxId
    offer: ReuseOffer
    home: StoreIdentity


@dataclass(frozen=True)
class Written:
    """The share that one rank stored, and data for DCP. It is sent in the rank's first result."""

    rank: int
    part: RankPart
    nodes: Mapping[str, bytes]
    opaque: frozenset[str]
    is_odd: bool
    tensors: Tensors
    check: str
    samples: Samples | None


class _Latest(local):
    """A thread's last session."""

    session: weakref.ref[WriterSession] | None = None


_latest = _Latest()


class WriterSession:
    """A save on one rank. ``alone``: whether this rank saves without collective calls.

    ``more``: a state to save in addition to the plan.
    """

    def __init__(
        self,
        repo: Repository,
        options: SaveOptions,
        *,
        rank: int,
        alone: bool,
        more: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        self.repo, self.options, self.rank, self.alone, self.more = repo, options, rank, alone, more
        self._progress = Progress(options.progress)
        self.number = repo.entropy(16)
        self.checkpoint = ""
        self._leader: Leader | None = None
        self._last_resort: weakref.finalize[..., WriterSession] | None = None
        self._begun: GlobalStorageData | None = None  # on the coordinator
        self._extra = Prepared([], [], [], b"")
        self._written: Written | None = None

        earlier = _latest.session() if _latest.session is not None else None
        if earlier is not None:  # the earlier save ran in this thread, so it has ended
            earlier.give_up()
        _latest.session = weakref.ref(self)

    def give_up(self) -> None:
        """Abort the transaction unless it has already ended."""
        if self._last_resort is not None:
            self._last_resort()

    def local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's local plan. Raises InvalidInput for a key that cannot be stored."""
        for item in plan.items:
            check_key(item.index.fqn)
        return replace(plan, storage_data=LocalStorageData(self.number))

    # the coordinator

    def begin(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """Begin the transaction, and return the plans with each rank's data."""
        options = self.options
        self._extra = prepare(self.more, options.attachments, rank=0, allow_pickle=options.allow_pickle)
        memory = GroupMemory(memory_of(self.repo.storage.url, "dcp"))
        leader = self._leader = Leader(self.repo, len(plans), memory, options, reuse=True)
        # DCP does not report that a different rank has failed
        self._last_resort = weakref.finalize(self, _give_up, leader, os.getpid())
        with self._aborting():
            txid = leader.start()
            offer = leader.reuse_offer(_streams(plans))
            self._begun = begun = GlobalStorageData(self.number, txid, offer, StoreIdentity.of(self.repo))
        return [replace(plan, storage_data=_answer(plan.storage_data, begun)) for plan in plans]

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> TxId:
        """Commit the shares of all ranks. Raises InvalidInput, and commits nothing, if a planned item is missing."""
        if self._leader is None or self._begun is None:
            raise InvalidInput("finish was called on a writer that has no global plan; call the methods in DCP's order")
        of_ranks = (result.storage_data for rank in results for result in rank)
        written = {stored.rank: stored for stored in of_ranks if isinstance(stored, Written)}
        if self._written is not None:
            written.setdefault(self.rank, self._written)  # a rank without items has no result
        with self._aborting():
            self.checkpoint = self._commit(self._leader, metadata, [written[rank] for rank in sorted(written)])
        return self._begun.txid

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort the transaction after an error in the context."""
        try:
            yield
        except BaseException as error:
            if self._leader is not None and self._last_resort is not None and self._last_resort.detach():
                self._leader.abort(error)
            raise

    def _commit(self, leader: Leader, metadata: Metadata, written: Sequence[Written]) -> str:
        streams = _all_streams(metadata, written)
        nodes = _nodes(metadata, written)
        tree = tree_of({key: (path_of(key, metadata.planner_data), node) for key, node in nodes.items()})
        if self.more:
            tree = merge([tree, decode_tree(self._extra.tree)])
        check_keys(tree)
        if any(stored.check != self.options.check_replicas for stored in written):
            raise InvalidInput(
                f"check_replicas is {self.options.check_replicas!r} on some ranks only; pass the same value on all "
                "ranks"
            )
        samples = (stored.samples for stored in written)
        compare(samples, leader.size, leader.memory.replicas, str(self.options.check_replicas))
        encoded = _note(metadata, tree, written).encoded(allow_pickle=self.options.allow_pickle)
        record, _ = leader.conclude([stored.part for stored in written], streams, encode_tree(tree), encoded)
        return record.manifest

    # every rank

    def write(self, plan: SavePlan, planner: Resolver) -> list[WriteResult]:
        """Store the items of a plan. They are durable when the method returns."""
        with self._aborting():
            self._written = self._write(plan, planner)
        sizes = {item.index: item.tensor_storage_size() or 0 for item in plan.items}
        results = [WriteResult(item.index, sizes[item.index], None) for item in plan.items]
        results = results or [WriteResult(MetadataIndex(""), 0, None)]  # to carry the samples to the coordinator
        return [replace(results[0], storage_data=self._written), *results[1:]]

    def _write(self, plan: SavePlan, planner: Resolver) -> Written:
        values = values_of(plan.items, planner, allow_pickle=self.options.allow_pickle)
        tensors = tensors_of(plan.items, alone=self.alone)
        txid, offer = self._offer(plan)
        prepared = self._prepared(values, tensors, planner)
        known = reusable_cells(self.repo, self.options.run, offer)
        part = write_part(self.repo, txid, offer, prepared, self.options, known=known, progress=self._progress)
        return Written(
            self.rank, part, values.nodes, frozenset(values.opaque), values.is_odd, replace(tensors, parts=[]),
            str(self.options.check_replicas), self._samples(planner),
        )  # fmt: skip

    def _prepared(self, values: Values, tensors: Tensors, planner: Resolver) -> Iterator[Prepared]:
        """Yield the tensors in windows, and all other values with the first window."""
        is_frozen, extra = frozen_by(self.options.frozen), self._extra
        rest = Prepared([*values.sources, *extra.sources], [*values.objects, *extra.objects], extra.attachments, b"")
        for window in tensors.windows(planner):
            yield replace(rest, sources=[*rest.sources, *sources_of(window, planner, is_frozen)])
            rest = Prepared([], [], [], b"")

    def _samples(self, planner: Resolver) -> Samples | None:
        """Return samples of this rank's whole tensors, even if another rank writes them.

        Return None if no check is wanted.
        """
        if self.alone or self.options.check_replicas == "off" or not isinstance(planner, DefaultSavePlanner):
            return None
        sources = [tensor_source(key, value, None, together=True) for key, value in planner.state_dict.items()
                   if is_whole(value)]  # fmt: skip
        return samples_of(sources, self.options.run, self.options.step, str(self.options.check_replicas))

    def _offer(self, plan: SavePlan) -> tuple[TxId, ReuseOffer]:
        """Return the transaction for this rank's uploads, and the cells that the rank may reuse.

        A rank with a cached plan does not begin a transaction, so it cannot call `begin_save`. It received its plan
        after the coordinator had begun the transaction, so gc keeps all live blobs.
        """
        if self._begun is not None:
            return self._begun.txid, self._begun.offer
        answer, options = plan.storage_data, self.options
        if isinstance(answer, GlobalStorageData):
            if answer.number == self.number:
                answer.home.check_shared(self.repo, answer.txid)
                return answer.txid, answer.offer
            answer.home.check(self.repo)
        return self.repo.new_txid(options.run, options.step), late_offer(self.repo, _streams([plan]), options)


def _answer(asked: object, begun: GlobalStorageData) -> GlobalStorageData | None:
    return replace(begun, number=asked.number) if isinstance(asked, LocalStorageData) else None


def _give_up(leader: Leader, process: int) -> None:
    if os.getpid() == process:  # not in a forked child, which has a copy of its parent's session
        leader.abort(RankFailed("another rank or DCP failed"))


def _streams(plans: Sequence[SavePlan]) -> Streams:
    """Return the tensors in these plans."""
    streams: dict[Name, tuple[str, tuple[int, ...]]] = {}
    for item in (item for plan in plans for item in plan.items):
        if item.tensor_data is not None:
            dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
            streams[TENSOR, item.index.fqn, 0, None] = (dtype, tuple(item.tensor_data.size))
    return streams


def _all_streams(metadata: Metadata, written: Sequence[Written]) -> Streams:
    """Return the tensors in the order of the metadata, with their stored dtypes and shapes. Raises InvalidInput."""
    forms: dict[Name, tuple[str, tuple[int, ...]]] = {}
    for stored in written:
        for name, (dtype, table) in stored.part.share.extents.items():
            form = (dtype, table.shape)
            if name[0] == TENSOR and forms.setdefault(name, form) != form:
                raise InvalidInput(
                    f"{name[1]!r} is {form} on rank {stored.rank}, but {forms[name]} on a different rank; nothing "
                    "was saved",
                    key=name[1],
                    rank=stored.rank,
                )
    alone = {key for stored in written for key in stored.tensors.chunks}
    streams: dict[Name, tuple[str, tuple[int, ...]]] = {}
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata) and key not in alone:
            name = (TENSOR, key, 0, None)
            streams[name] = forms.pop(name, (dtype_name(value.properties.dtype), tuple(value.size)))
    return streams | forms


def _nodes(metadata: Metadata, written: Sequence[Written]) -> dict[str, Node]:
    """Return the tree node of every key. Raises InvalidInput for a value that no rank stored."""
    encoded = {key: data for stored in written for key, data in stored.nodes.items()}
    objects = {entry.key for stored in written for entry in stored.part.objects}
    chunks = {key: of_key for stored in written for key, (_, of_key) in stored.tensors.chunks.items()}
    nodes: dict[str, Node] = {}
    for key, value in metadata.state_dict_metadata.items():
        if key in chunks:
            nodes |= {chunk.key: TENSOR_LEAF for chunk in chunks[key]}
        elif isinstance(value, BytesStorageMetadata):
            if key not in encoded and key not in objects:
                raise InvalidInput(f"{key!r} was planned, but no rank stored it; nothing was saved", key=key)
            nodes[key] = decode_tree(encoded[key]) if key in encoded else OBJECT
        else:
            nodes[key] = TENSOR_LEAF
    return nodes


def _note(metadata: Metadata, tree: Node, written: Sequence[Written]) -> Note:
    opaque = frozenset(key for part in written for key in part.opaque)
    chunks = {key: chunk for part in written for key, chunk in part.tensors.chunks.items()}
    schema = schema_of(tree, lambda key: Opaque)
    keys = list(metadata.state_dict_metadata)
    as_usual = not chunks and not any(part.is_odd for part in written) and schema.paths == metadata.planner_data
    if as_usual and set(keys) == {*schema.tensors, *schema.values}:
        return Note(opaque=opaque)
    return Note(keys, metadata.planner_data, opaque, chunks)
