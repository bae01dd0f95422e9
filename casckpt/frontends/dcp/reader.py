"""The storage reader for `torch.distributed.checkpoint.load`."""

from __future__ import annotations

import io
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as Protocol
from torch.futures import Future

from casckpt.base.groups import in_batches
from casckpt.base.names import check_run
from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress, Shown
from casckpt.contents.checkpoint import Checkpoint, warn_if_forgotten
from casckpt.errors import Conflict, Damaged, InvalidInput, Mismatch, NotFound, RankFailed
from casckpt.format.regions import Box, Region, Shape
from casckpt.format.sections.index import Entry
from casckpt.frontends.dcp.contents import DcpContents
from casckpt.frontends.dcp.ids import hook, is_usable, reference_of
from casckpt.frontends.dcp.items import WINDOW_BYTES, check_planned
from casckpt.frontends.dcp.planners import PickleFreeLoadPlanner, ValueStream, has_methods_of
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.loading.fit import Fit, check_fit, log_once, saved_shapes, shape_of
from casckpt.loading.job_reads import MEETING, WAIT_SHARE, Deal, JobReads, Needs, deals, passing
from casckpt.loading.options import LoadOptions, Unread
from casckpt.loading.tied_tensors import Content, TiedTensors
from casckpt.plan.reads import covers
from casckpt.ranks.ranks import connect_all, job_size, job_timeout, this_rank
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.dtypes import check_cast, torch_dtype
from casckpt.tensors.memory import Destination
from casckpt.tensors.shards import check_destination

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Seen:
    """A message that load plans carry: the checkpoint that a rank found, its host, and whether it ``shares`` reads.

    ``checkpoint``: empty for a checkpoint that a rank saved without the others. ``needs``: the blobs that the rank can
    share with other hosts.
    """

    checkpoint: str = ""
    host: str = ""
    shares: bool = False
    rank: int = -1
    needs: Needs | None = None


@dataclass(frozen=True)
class _Reply:
    """The reply to `_Seen`: the number of all ranks, and a name for the load.

    ``ranks_here``: the number of ranks on the receiver's host, ``sharing`` of which share reads. ``deal``: which blobs
    hosts pass to each other.
    """

    ranks: int = 1
    ranks_here: int = 1
    sharing: int = 0
    load_id: str = ""
    deal: Deal | None = None


class StorageReader(Protocol):
    """``dcp.load(state_dict, storage_reader=StorageReader(store, "sft@latest"))``.

    ``ref``: a reference or a Checkpoint from any front end. You may omit it if each call passes ``checkpoint_id=REF``.
    REF may also be the path that was given to the save; see `casckpt.frontends.dcp.ids`. ``run``: the run to use if
    ``checkpoint_id`` is only a step. ``verify``: compare every cell that is read with its digest. ``cast``: convert
    dtypes, as DCP does, and log each conversion; otherwise, a different dtype raises Mismatch. ``allow_pickle``: pass
    pickles to the planner, which runs code from them. ``unread``: a rank whose planner has allow_partial_load raises
    MissingKey if nothing is filled, or if the checkpoint lacks the names of more than a tenth of the planner's
    tensors. "ignore" disables this check.

    A failed load raises DCP's CheckpointException on every rank. It contains Damaged (which names the key, blob and
    checkpoints), Mismatch or StorageError. After an error during the read, the state is undefined.
    """

    def __init__(
        self,
        store: AnyStore,
        ref: str | os.PathLike[str] | Checkpoint | None = None,
        *,
        run: str = "default",
        verify: bool = True,
        cast: bool = True,
        allow_pickle: bool = False,
        threads: int | None = None,
        progress: Shown | None = None,
        unread: Unread = "warn",
    ) -> None:
        """See the class for the arguments."""
        super().__init__()
        self._store = as_store(store)
        self._run = check_run(run)
        self._ref = ref if ref is None or isinstance(ref, Checkpoint) else reference_of(ref, None)
        self._load_id = str(uuid4())
        self._threads = usable_threads(threads)
        options = LoadOptions(verify=verify, cast=cast, allow_pickle=allow_pickle, threads=threads, unread=unread)
        self._options = options.checked()
        self._shown = progress
        self._failed: Exception | None = None
        self._absent = False  # whether no checkpoint of all ranks has this name
        self._alone = False
        self._opened: DcpContents | None = None

    @hook
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Load ``checkpoint_id`` next: a reference, a step, or a path. None has no effect."""
        if checkpoint_id is not None:
            self._ref = reference_of(checkpoint_id, self._run)
        self._load_id = str(uuid4())
        self._opened, self._failed, self._absent = None, None, False

    @hook
    def read_metadata(self, *args: object, rank: int | None = None, **kwargs: object) -> Metadata:
        """Return the checkpoint's metadata for DCP.

        DCP first calls this method without ``rank``. If that call finds no checkpoint that all ranks saved, the second
        call looks for a checkpoint that this rank saved alone (``use_collectives=False``). DCP drops the errors of both
        calls. Therefore, if the second call also fails, `set_up_storage_reader` raises its error. If that error is
        NotFound, it raises the error of the first call instead.
        """
        if rank is None:
            self._failed, self._absent = None, False
        try:
            return self._metadata(rank)
        except Exception as error:  # DCP would drop any error
            if self._failed is None or not isinstance(error, NotFound):
                self._failed = error
            self._opened = None
            if rank is None:
                raise
            return Metadata({})

    def _metadata(self, rank: int | None) -> Metadata:
        if self._ref is None:
            raise InvalidInput(
                "the StorageReader has no checkpoint to load; pass ref=, or pass checkpoint_id=REF to each load"
            )
        self._alone = rank is not None
        checkpoint = self._of_all(self._ref) if rank is None else self._of_rank(self._ref, rank)
        options = replace(self._options, rank=this_rank() if rank is None else rank)
        self._opened = DcpContents(self._store, checkpoint, options)
        metadata = self._opened.metadata()
        self._known = frozenset(metadata.state_dict_metadata)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self._load_id
        return metadata

    def _of_all(self, ref: str | Checkpoint) -> Checkpoint:
        try:
            found = self._store.get(ref)
        except NotFound:
            self._absent = True
            raise
        warn_if_forgotten(found.commit)
        return found

    def _of_rank(self, ref: str | Checkpoint, rank: int) -> Checkpoint:
        """Return the checkpoint that the rank saved alone. Raises the error of `_of_all` unless that was NotFound."""
        if not self._absent or not isinstance(ref, str) or "@" not in ref:
            raise self._failed or NotFound(f"rank {rank} did not save a checkpoint of its own as {ref}")
        run, _, step = ref.rpartition("@")
        return self._store.get(f"{run}/rank-{rank}@{step}")

    @hook
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Begin a load. Raises the error of `read_metadata` if that call failed."""
        if self._opened is None and self._failed is not None:  # otherwise DCP did not call it
            raise self._failed
        self._now  # noqa: B018 - raises if the caller is not dcp.load

    @hook
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan the checkpoint that this rank found, and the blobs that it needs."""
        repo, manifest, needs = self._store.repository, self._now.contents.manifest, None
        if self._alone:
            return replace(plan, storage_data=_Seen(host=repo.host))
        reader = self._reader(_Reply(sharing=int(job_size() > 1)))
        if reader.reads is not None:
            needs = Needs.of(repo, manifest, reader.ranges(self._parts(plan.items)), reader.reads)
        seen = _Seen(self._now.checkpoint.id, repo.host, repo.shares, this_rank(), needs)
        return replace(plan, storage_data=seen)

    def _parts(self, items: Sequence[ReadItem]) -> list[tuple[Entry, Region]]:
        """Return the parts of entries that ``items`` read, and make these entries ready."""
        tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
        found = [(*self._now.tensor(item.storage_index), item) for item in tensors]
        self._now.contents.manifest.ready([entry.number for entry, *_ in found], ())
        return [(entry, _region(base, item)) for entry, base, item in found]

    @hook
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks found the same checkpoint, because "latest" may change between the ranks' lookups.

        Raises Conflict.
        """
        seen = [plan.storage_data if isinstance(plan.storage_data, _Seen) else _Seen() for plan in plans]
        ids = {one.checkpoint for one in seen if one.host}
        if len(ids) > 1:
            raise Conflict(
                f"{self._ref} refers to {len(ids)} different checkpoints across the ranks, because of a concurrent "
                "save. Load again, "
                "or use RUN@STEP",
                checkpoints=tuple(sorted(ids)),
            )
        on_host, sharing = Counter(one.host for one in seen), Counter(one.host for one in seen if one.shares)
        manifest = self._now.contents.manifest
        # casckpt does not know DCP's process group, so hosts pass on blobs only if all ranks of the job take part
        together = [one.rank for one in seen] == list(range(job_size()))
        needs = [one.needs if together else None for one in seen]
        dealt = deals(needs, manifest.head.digest, manifest.blob_sizes)
        shared = {host: count for host, count in sharing.items() if together or count > 1}
        load_id = str(uuid4())  # DCP calls `reset` only if a load names a checkpoint
        replies = (
            _Reply(len(plans), on_host[one.host], shared.get(one.host, 0), load_id, deal)
            for one, deal in zip(seen, dealt, strict=True)
        )
        return [replace(plan, storage_data=reply) for plan, reply in zip(plans, replies, strict=True)]

    @hook
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and values. The future is always done, so it cannot hide an error."""
        reply = plan.storage_data if isinstance(plan.storage_data, _Reply) else _Reply()
        job = None if reply.deal is None else _connected(reply.deal, reply.load_id)  # first: the other ranks wait
        download, manifest = self._reader(reply), self._now.contents.manifest
        with download.sharing(), passing(job, self._store.repository, manifest, download.reads):
            self._now.check_complete(plan, planner)
            self._check_fit(planner)
            self._read_values([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)
            parts = self._parts(plan.items)
            if download.reads is not None:
                download.reads.begin(download.ranges(parts))
            for window in _windows(plan.items, planner):
                self._read_tensors(download, window, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _reader(self, reply: _Reply) -> EntryReader:
        repo, manifest, progress = self._store.repository, self._now.contents.manifest, Progress(self._shown).of(None)
        patience = WAIT_SHARE * job_timeout()
        reads = repo.host_reads(manifest.head.digest, reply.load_id, this_rank(), reply.sharing, patience)
        return EntryReader(
            repo, manifest, self._options.verify, self._threads, progress, reply.ranks, reply.ranks_here, reads=reads
        )

    def _check_fit(self, planner: LoadPlanner) -> None:
        """Check that this rank's names match those in the checkpoint, before the load changes any tensor."""
        if self._options.unread == "ignore" or not isinstance(planner, DefaultLoadPlanner):
            return
        saved = saved_shapes(self._now.contents.manifest)
        wanted = {key: shape for key, value in planner.state_dict.items() if (shape := shape_of(value)) is not None}
        filled = {key: key for key in wanted if key in self._known}
        fit = Fit(filled, {key: shape for key, shape in wanted.items() if key not in filled})
        where = f"{self._now.checkpoint.run}@{self._now.checkpoint.step}"
        warning = check_fit(fit, saved, where, way="rename the keys accordingly, or use store.load with")
        log_once(self._now.checkpoint.id, warning, list(fit.unfilled))

    @property
    def _now(self) -> DcpContents:
        if self._opened is None:
            raise InvalidInput("a StorageReader was used before read_metadata was called; pass the reader to dcp.load")
        return self._opened

    def _read_values(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        keys = [item.storage_index.fqn for item in items]
        if isinstance(planner, PickleFreeLoadPlanner):
            streams: dict[str, io.BytesIO] = {key: ValueStream(v) for key, v in self._now.values(keys).items()}
        else:
            by_torch = getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes
            archives = self._now.archives(keys, unpickled=by_torch)
            streams = {key: io.BytesIO(data) for key, data in archives.items()}
        for item in items:
            planner.load_bytes(item, streams[item.storage_index.fqn])

    def _read_tensors(self, download: EntryReader, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        pairs = [(item, planner.resolve_tensor(item)) for item in items]
        converted: dict[str, None] = {}
        tied = TiedTensors(self._now.contents.manifest)
        held = planner.state_dict if isinstance(planner, DefaultLoadPlanner) else {}
        parts = [(item, target.detach(), held.get(item.dest_index.fqn)) for item, target in pairs]
        wants = [want for part in parts for want in self._wants(*part, converted, tied)]
        tied.check(download)
        together, alone = tied.in_turns(wants)
        for turn in (together, *([want] for want in alone)):
            download.fill(turn)
        if converted:
            log.warning("converted to the dtype of the target tensor: %s", ", ".join(list(converted)[:8]))
        for item, target in pairs:
            planner.commit_tensor(item, target)

    def _wants(
        self, item: ReadItem, target: torch.Tensor, held: Any, converted: dict[str, None], tied: TiedTensors
    ) -> Iterator[RegionRequest]:
        """Yield the request for an item, if it is not empty. ``held``: the value in the state, if it is known."""
        key = item.storage_index.fqn
        entry, base = self._now.tensor(item.storage_index)
        if tuple(target.shape) != tuple(item.lengths):
            raise Mismatch(
                f"{key!r}: the planner returned a tensor of shape {list(target.shape)}, not {list(item.lengths)}",
                key=key,
            )
        stored = torch_dtype(entry.dtype)
        if stored != target.dtype:
            check_cast(key, stored, target.dtype, cast=self._options.cast, where="StorageReader")
            converted[key] = None
        check_destination(key, target)
        if is_dtensor(held):
            start = zip(item.dest_index.offset or (), item.dest_offsets, strict=True)
            check_planned(key, held, Box(tuple(a + b for a, b in start), tuple(item.lengths)))
        region = _region(base, item)
        table = self._now.contents.manifest.extents(entry)
        if not covers(table, region):
            raise Damaged(f"the checkpoint holds only a part of {key!r}; {region} is incomplete", key=key)
        if region.numel:
            tied.add(Content(key, target, entry, region))
            destination = Destination(region, target, stored, held if is_dtensor(held) else None)
            yield RegionRequest(entry.number, destination, table)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id is a reference, a step, or a path that names a run."""
        return is_usable(reference_of, checkpoint_id)


def _region(base: Shape, item: ReadItem) -> Region:
    """Return the region of an entry that an item reads. ``base``: the offset of the item's chunk in the entry."""
    box = Box(tuple(a + b for a, b in zip(base, item.storage_offsets, strict=True)), tuple(item.lengths))
    return Region(box, 0, box.numel)


def _connected(deal: Deal, load_id: str) -> JobReads | None:
    """Connect to the other ranks. Return None if that fails, which it does on all ranks.

    It fails early enough that DCP can still report the error of a rank that does not connect.
    """
    try:
        return JobReads(deal, connect_all(f"dcp {load_id}", min(MEETING, job_timeout() / 2)), lambda: None)
    except RankFailed as error:
        log.warning("each host reads all that it needs from the store, because ranks cannot connect (%s)", error)
        return None


def _windows(items: Sequence[ReadItem], planner: LoadPlanner) -> Iterator[list[ReadItem]]:
    """Yield all tensor items together, or in windows if the planner may create the tensors."""
    tensors = [item for item in items if item.type == LoadItemType.TENSOR]
    in_place = ("resolve_tensor", "transform_tensor", "lookup_tensor", "commit_tensor")
    if has_methods_of(planner, DefaultLoadPlanner, *in_place):
        return iter([tensors])
    return in_batches(tensors, lambda item: item.lengths.numel() * 8, WINDOW_BYTES)  # the largest common itemsize
