"""Strategies for Megatron-core's own ``save`` and ``load``. Importing this module imports Megatron-core.

The store holds the tensors and objects; ``casckpt.json`` in the folder that Megatron keeps names the checkpoint.
``common.pt`` is also an attachment, so the checkpoint in the store is complete without the folder.

Up to 0.16, Megatron accepts any subclass of its base strategies, and has a registry of load strategies. From 0.17 on,
it silently replaces any save strategy that is not a subclass of its torch_dist strategy. As a load strategy, it
accepts any object with a ``load`` method, and uses its own strategy by default. From 0.19 on, the common part is also
an object.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import mapping as theirs
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from casckpt.contents.checkpoint import Checkpoint
from casckpt.frontends.megatron import mapping as ours
from casckpt.frontends.megatron.common import COMMON_NAME, classes_to_register
from casckpt.frontends.megatron.config import BACKEND, VERSION
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors
from casckpt.frontends.megatron.folders import Folder, check_common, drop, point, pointed_at
from casckpt.frontends.megatron.loading import RankLoad
from casckpt.frontends.megatron.nesting import Nested
from casckpt.frontends.megatron.place import StoreRef
from casckpt.frontends.megatron.saving import Ending, Saving, wait_for_end
from casckpt.frontends.megatron.stored import MegatronCheckpoint, tensors_metadata
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.loading.options import ReadArguments
from casckpt.ranks.ranks import Ranks, on_each, open_ranks
from casckpt.saving.options import SaveArguments
from casckpt.tensors.objects import write_archive

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
_WRITES_COMMON = "common_strategy" in inspect.signature(dist_checkpointing.save).parameters  # up to 0.18
_COMMON_KEY = "common_state"  # from 0.19 on, the key of the object that holds the common part
_NUMBER = re.compile(r"[0-9]+$")
StepOf: TypeAlias = int | Callable[[Path], int] | None
RunOf: TypeAlias = str | Callable[[Path], str]

# Our objects pass Megatron's isinstance checks, and its objects pass our attribute checks.
for name in ("ShardedBase", "ShardedTensor", "ShardedObject", "ShardedTensorFactory"):
    getattr(theirs, name).register(getattr(ours, name))


@contextmanager
def _errors_of_both() -> Iterator[None]:
    """Raise each CheckpointingException as an error that is also Megatron-core's CheckpointingException."""
    try:
        with checkpointing_errors():
            yield
    except CheckpointingException as error:
        kind = type(error)
        both = type(kind.__name__, (kind, theirs.CheckpointingException), {"__module__": kind.__module__})
        raise both(str(error), **error.__dict__) from error


class _Arguments(SaveArguments):
    run: str
    step: int


class CasSaveShardedStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc] # Megatron-core has no types
    """A save strategy: ``dist_checkpointing.save(state, folder, sharded_strategy=CasSaveShardedStrategy(...))``.

    ``run``, ``step``: the run and step of all saves, or functions of the folder. If ``step`` is None, the step is the
    number at the end of the folder's name (``iter_0000100``). ``overwrite`` (True by default): replace an existing
    step, just as Megatron overwrites a folder, for example after the training was rolled back. ``loads``: the strategy
    with which this training loads; the checkpoint that it last loaded becomes the lineage of all saves.
    ``fully_parallel``, ``options``: see `casckpt.frontends.megatron.save`. One strategy can serve many saves.
    """

    can_handle_sharded_objects = True  # the store also holds objects

    def __init__(
        self,
        store: AnyStore,
        *,
        run: RunOf,
        step: StepOf = None,
        fully_parallel: bool = False,
        loads: CasLoadShardedStrategy | None = None,
        **options: Unpack[SaveArguments],
    ) -> None:
        # The base class has different arguments in each version, and nothing that it sets is needed.
        self.backend, self.version = BACKEND, VERSION
        self.store = as_store(store)
        self.run, self.step = run, step
        self.fully_parallel, self.options = fully_parallel, options
        self._loads, self._warned = loads, False

    def save(self, sharded_state_dict: Nested, checkpoint_dir: Folder) -> None:
        """Save, and return after the commit. Raises the errors of `casckpt.frontends.megatron.save`."""
        with _errors_of_both():
            saving, options, finish = self._prepared(sharded_state_dict, Path(checkpoint_dir))
            self.store.save(saving.state, **options)
            finish()

    def async_save(
        self, sharded_state_dict: Nested, checkpoint_dir: Folder, async_strategy: str = "mcore"
    ) -> async_utils.AsyncRequest:
        """Copy the tensors, start the save, and return a request whose finalize_fns wait for its end.

        ``async_strategy``: the queue that schedules the request, which Megatron-core calls "mcore" or "nvrx". The
        request's ``async_fn`` only waits, so that the queue knows when the save has ended.
        """
        ending = cache(Ending)
        with _errors_of_both():
            saving, options, finish = self._prepared(sharded_state_dict, Path(checkpoint_dir), begin=ending)
            future = self.store.save_async(saving.state, **options)
        future.add_done_callback(lambda _: ending().reached())

        def finalize() -> None:
            with _errors_of_both():
                future.result()
                finish()

        return _request_class(async_strategy)(wait_for_end, (ending().path,), [finalize])

    def _prepared(
        self, state: Nested, folder: Path, begin: Callable[[], object] = lambda: None
    ) -> tuple[Saving, _Arguments, Callable[[], None]]:
        """Return this rank's part, the arguments for `Store.save`, and a function to call after the save.

        ``begin``: a function that is called on each rank. All ranks raise its errors.
        """
        ranks = open_ranks(self.options.get("process_group"))
        check = self.options.get("check_replicas", "sample")
        saving = Saving(state, ranks.rank, fully_parallel=self.fully_parallel, check_replicas=check)
        common = cache(lambda: _common(state, folder) if ranks.rank == 0 else [])

        def locate() -> StoreRef:
            begin()
            self._warn_of_classes(common())  # read here, so that all ranks raise its error
            run = self.run if isinstance(self.run, str) else self.run(folder)
            return StoreRef(self.store, f"{run}@{self._step(folder)}")

        place, replaces = saving.agree(ranks, locate, validate=False, preprocess=None)
        if any(part.handed_over for part in common()):
            saving.leave_out(_COMMON_KEY)
        files = {COMMON_NAME: common()[0].file} if common() else {}
        run, step = place.run_and_step()
        loaded = None if self._loads is None else self._loads.loaded
        given: _Arguments = {
            "lineage": None if loaded is None else loaded.child_lineage, **self.options, "run": run, "step": step,
            "attachments": {**(self.options.get("attachments") or {}), **saving.files, **files},
            "overwrite": self.options.get("overwrite", True) or replaces,
        }  # fmt: skip

        return saving, given, partial(_point, ranks, folder, place, common())

    def _warn_of_classes(self, common: Sequence[_Common]) -> None:
        """Warn once about the classes that a load in another program needs."""
        for part in () if self._warned else common:
            self._warned = True
            classes = classes_to_register(part.file)
            if classes:
                log.warning(
                    "common.pt holds %s. Megatron-core's load accepts only the classes that it has registered. A load "
                    "with casckpt.frontends.megatron needs megatron.core for these classes, and allow_pickle=True for "
                    "others", ", ".join(classes),
                )  # fmt: skip

    def _step(self, folder: Path) -> int:
        if isinstance(self.step, int):
            return self.step
        if self.step is not None:
            return self.step(folder)
        number = _NUMBER.search(folder.name)
        if not number:
            raise CheckpointingException(
                f"{folder} does not end in a number; pass step= (a number or a function) to the strategy"
            )
        return int(number[0])


class _Common(NamedTuple):
    """The contents of common.pt.

    ``handed_over``: whether Megatron passed them as an object and does not write the file itself.
    """

    file: bytes
    handed_over: bool


def _common(state: Nested, folder: Path) -> list[_Common]:
    """Return the common part in a list. The list is empty if the strategy is called directly, without a common part."""
    path = folder / COMMON_NAME
    if _COMMON_KEY not in state or (_WRITES_COMMON and path.exists()):
        return [_Common(path.read_bytes(), handed_over=False)] if path.exists() else []
    return [_Common(write_archive(state[_COMMON_KEY].data), handed_over=True)]


def _point(ranks: Ranks, folder: Path, place: StoreRef, common: Sequence[_Common]) -> None:
    """Write the checkpoint's location into the folder. ``common``: the common part, on rank 0."""

    def write() -> None:
        if ranks.rank == 0:
            point(folder, place, next((part.file for part in common if part.handed_over), None))

    ranks.exchange(write, lambda done: done)


def _request_class(async_strategy: str) -> Any:
    """Return the queue's request class. Megatron passes "nvrx" by default, even if that extension is not installed."""
    if async_strategy == "nvrx":
        with suppress(ImportError):
            from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

            return AsyncRequest
    return async_utils.AsyncRequest


class CasLoadShardedStrategy:
    """A load strategy: ``dist_checkpointing.load(state, folder, sharded_strategy=CasLoadShardedStrategy())``.

    ``store``: the store to load from, or None for the store that ``casckpt.json`` in the folder names. ``options``: see
    `casckpt.frontends.megatron.load`. ``loaded``: the checkpoint that was last loaded.
    """

    can_handle_sharded_objects = True  # the store also holds objects

    def __init__(
        self,
        store: AnyStore | None = None,
        *,
        process_group: ProcessGroup | None = None,
        **options: Unpack[ReadArguments],
    ) -> None:
        self.store = None if store is None else as_store(store)
        self.process_group, self.options = process_group, options
        self.loaded: Checkpoint | None = None

    def load(self, sharded_state_dict: Nested, checkpoint_dir: Folder, async_strategy: Any = None) -> Nested:
        """Load the values of a sharded state dict. Raises the errors of `casckpt.frontends.megatron.load`."""
        with _errors_of_both():
            ranks = open_ranks(self.process_group)
            stored = MegatronCheckpoint.together(ranks, lambda: self._place(checkpoint_dir))
            loading = RankLoad(stored, sharded_state_dict)

            def plan() -> None:
                if ranks.rank == 0:
                    check_common(stored, checkpoint_dir)
                loading.plan("raise_unexpected")

            on_each(ranks, plan)
            loading.read(process_group=self.process_group, **self.options)
        self.loaded = stored.checkpoint
        return loading.loaded()

    @_errors_of_both()
    def load_tensors_metadata(self, checkpoint_dir: Folder, metadata: Any = None) -> dict[str, Any]:
        """See `casckpt.frontends.megatron.load_tensors_metadata`."""
        return tensors_metadata(MegatronCheckpoint.read(self._place(checkpoint_dir)), theirs.ShardedTensor)

    @_errors_of_both()
    def load_sharded_metadata(self, checkpoint_dir: Folder) -> dict[str, Any]:
        """See `casckpt.frontends.megatron.load_sharded_metadata`."""
        stored = MegatronCheckpoint.read(self._place(checkpoint_dir))
        objects = {
            key: theirs.ShardedObject(shard.key, None, shard.global_shape, shard.global_offset)
            for key, shard in stored.objects.items()
        }
        return {**tensors_metadata(stored, theirs.ShardedTensor), **objects}

    @_errors_of_both()
    def remove_sharded_tensors(self, checkpoint_dir: Folder, key_prefix: str) -> None:
        """See `casckpt.frontends.megatron.remove_sharded_tensors`."""
        drop(self._place(checkpoint_dir), key_prefix, self.options.get("allow_pickle", False))

    @_errors_of_both()
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise CheckpointingException for a checkpoint from a different backend."""
        if loaded_backend != BACKEND:
            raise CheckpointingException(f"the checkpoint was written by {loaded_backend!r}, not by {BACKEND!r}")

    @_errors_of_both()
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise CheckpointingException for a checkpoint with a later version."""
        if loaded_version > VERSION:
            raise CheckpointingException(f"the checkpoint has version {loaded_version}; load it with a newer casckpt")

    def _place(self, folder: Folder) -> StoreRef:
        url, ref = pointed_at(folder)
        return StoreRef(self.store or as_store(url), ref)
