"""Strategies for Megatron-core's own ``save`` and ``load``. Importing this module imports Megatron-core.

The tensors and objects go into the store; in the folder that Megatron keeps, ``casckpt.json`` says where. ``common.pt``
goes along as an attachment, so that the checkpoint in the store is whole without the folder.

Up to 0.16, Megatron takes any subclass of its base strategies, and has a registry of those for a load. From 0.17 on it
replaces all but subclasses of its own torch_dist strategy by that, without a word, takes for a load whatever has a
``load``, and its own where none is given. From 0.19 on it hands the common part over as one more object.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import mapping as theirs
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from casckpt.frontends.megatron import mapping as ours
from casckpt.frontends.megatron.background import Ending, wait_for_end
from casckpt.frontends.megatron.claims import Claim, Sharing, plan_sharing
from casckpt.frontends.megatron.common import COMMON_NAME, classes_to_register, places_of
from casckpt.frontends.megatron.config import BACKEND, VERSION
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors
from casckpt.frontends.megatron.folders import Folder, check_common, place_in, point
from casckpt.frontends.megatron.loading import RankLoad
from casckpt.frontends.megatron.nesting import Nested
from casckpt.frontends.megatron.place import StoreRef
from casckpt.frontends.megatron.reading import tensors_metadata
from casckpt.frontends.megatron.removing import drop, folder_noted, follow
from casckpt.frontends.megatron.saving import Saving
from casckpt.frontends.megatron.stored import MegatronCheckpoint
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.loading.options import ReadArguments
from casckpt.ranks.ranks import Ranks, everyone, open_ranks
from casckpt.saving.options import SaveArguments
from casckpt.tensors.objects import write_archive

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
_WRITES_COMMON = "common_strategy" in inspect.signature(dist_checkpointing.save).parameters  # up to 0.18
_COMMON_KEY = "common_state"  # of the object that the common part is after that
_NUMBER = re.compile(r"[0-9]+$")
StepOf: TypeAlias = int | Callable[[Path], int] | None
RunOf: TypeAlias = str | Callable[[Path], str]

# So that our objects pass Megatron's isinstance, as its own pass our tests of attributes.
for name in ("ShardedBase", "ShardedTensor", "ShardedObject", "ShardedTensorFactory"):
    getattr(theirs, name).register(getattr(ours, name))


@contextmanager
def _errors_of_both() -> Iterator[None]:
    """Raise what is a CheckpointingException as one of Megatron-core's too."""
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
    """Saves into a store: ``dist_checkpointing.save(state, folder, sharded_strategy=CasSaveShardedStrategy(...))``.

    ``run``, ``step``: of all saves, or a function of the folder; a step of None: the number at the end of its name
    (``iter_0000100``). ``forget_removed``: after a save, forget what was saved into folders beside this one that are
    gone, see `casckpt.frontends.megatron.forget_removed`.
    ``overwrite`` (unless False): a step that exists is replaced, as Megatron writes over a folder: a training that was
    rolled back comes to it again. ``fully_parallel``, ``options``: see `casckpt.frontends.megatron.save`. One strategy
    serves many saves.
    """

    can_handle_sharded_objects = True  # they go into the store too

    def __init__(
        self,
        store: AnyStore,
        *,
        run: RunOf,
        step: StepOf = None,
        fully_parallel: bool = False,
        forget_removed: bool = False,
        **options: Unpack[SaveArguments],
    ) -> None:
        # That of the base class takes other arguments in each version, and nothing that it sets is used.
        self.backend, self.version = BACKEND, VERSION
        self.store = as_store(store)
        self.run, self.step = run, step
        self.fully_parallel, self.options = fully_parallel, options
        self.forget_removed, self._said = forget_removed, False

    def save(self, sharded_state_dict: Nested, checkpoint_dir: Folder) -> None:
        """Save, and return once it is committed. Raises as `casckpt.frontends.megatron.save`."""
        with _errors_of_both():
            saving, options, finish = self._prepared(sharded_state_dict, Path(checkpoint_dir))
            self.store.save(saving.state, **options)
            finish()

    def async_save(
        self, sharded_state_dict: Nested, checkpoint_dir: Folder, async_strategy: str = "mcore"
    ) -> async_utils.AsyncRequest:
        """Copy the tensors, begin to save, and return a request whose finalize_fns wait for the end.

        ``async_strategy``: whose queue is to schedule the request, as Megatron-core calls it: "mcore" or "nvrx". Its
        ``async_fn`` has nothing to do but to wait, so that the queue knows when the save is over.
        """
        endings: list[Ending] = []
        with _errors_of_both():
            saving, options, finish = self._prepared(
                sharded_state_dict, Path(checkpoint_dir), begin=lambda: endings.append(Ending())
            )
            future = self.store.save_async(saving.state, **options)
        future.add_done_callback(lambda _: endings[0].reached())

        def finalize() -> None:
            with _errors_of_both():
                future.result()
                finish()

        return _request_class(async_strategy)(wait_for_end, (endings[0].path,), [finalize])

    def _prepared(
        self, state: Nested, folder: Path, begin: Callable[[], None] = lambda: None
    ) -> tuple[Saving, _Arguments, Callable[[], None]]:
        """This rank's part, the arguments of `Store.save`, and what is to be done when that is through."""
        ranks = open_ranks(self.options.get("process_group"))
        check = self.options.get("check_replicas", "sample")
        saving = Saving(state, ranks.rank, fully_parallel=self.fully_parallel, check_replicas=check)
        common: list[_Common] = []  # on rank 0

        def locate() -> StoreRef:
            begin()
            if ranks.rank == 0:
                common.extend(_common(state, folder))
                self._say_what_needs_classes(common)
            run = self.run if isinstance(self.run, str) else self.run(folder)
            return StoreRef(self.store, f"{run}@{self._step(folder)}")

        place, replaces = saving.agree(ranks, locate, validate=False, preprocess=None)
        if any(one.handed_over for one in common):
            saving.leave_out(_COMMON_KEY)
        files = {COMMON_NAME: common[0].file} if common else {}
        run, step = place.run_and_step()
        given: _Arguments = {
            **self.options, "run": run, "step": step,
            "attachments": {**(self.options.get("attachments") or {}), **saving.files, **files},
            "metadata": {**(self.options.get("metadata") or {}), **folder_noted(folder)},
            "overwrite": self.options.get("overwrite", True) or replaces,
        }  # fmt: skip

        def finish() -> None:
            _point(ranks, folder, place, common)
            if self.forget_removed and ranks.rank == 0:
                follow(self.store, folder, run)

        return saving, given, finish

    def _say_what_needs_classes(self, common: Sequence[_Common]) -> None:
        """Once: whoever loads the checkpoint elsewhere should not be the first to hear of it."""
        for one in () if self._said else common:
            self._said = True
            classes = classes_to_register(one.file)
            if classes:
                log.warning(
                    "common.pt holds %s, at %s: a load by Megatron-core takes what it registers; one by "
                    "casckpt.frontends.megatron needs megatron.core imported for that, allow_pickle=True for the rest",
                    ", ".join(classes),
                    ", ".join(places_of(one.file, classes)) or "places that cannot be told",
                )

    def _step(self, folder: Path) -> int:
        if isinstance(self.step, int):
            return self.step
        if self.step is not None:
            return self.step(folder)
        found = _NUMBER.search(folder.name)
        if not found:
            raise CheckpointingException(f"{folder} does not end in a number; give the strategy step=, or a function")
        return int(found[0])


class _Common(NamedTuple):
    """The contents of common.pt. ``handed_over``: as an object; Megatron does not write the file itself."""

    file: bytes
    handed_over: bool


def _common(state: Nested, folder: Path) -> list[_Common]:
    """None where the strategy is called by itself: then there is no common part."""
    path = folder / COMMON_NAME
    if _COMMON_KEY not in state or (_WRITES_COMMON and path.exists()):
        return [_Common(path.read_bytes(), handed_over=False)] if path.exists() else []
    return [_Common(write_archive(state[_COMMON_KEY].data), handed_over=True)]


def _point(ranks: Ranks, folder: Path, place: StoreRef, common: Sequence[_Common]) -> None:
    """Say in the folder where the checkpoint is. ``common``: on rank 0, if there is one."""

    def write() -> None:
        if ranks.rank == 0:
            point(folder, place, next((one.file for one in common if one.handed_over), None))

    ranks.exchange(write, lambda done: done)


def _request_class(async_strategy: str) -> Any:
    """That of the queue that is to schedule it. "nvrx" is what Megatron says where nobody has chosen."""
    if async_strategy == "nvrx":
        with suppress(ImportError):
            from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

            return AsyncRequest
    return async_utils.AsyncRequest


class CasLoadShardedStrategy:
    """Loads from a store: ``dist_checkpointing.load(state, folder, sharded_strategy=CasLoadShardedStrategy())``.

    ``store``: None, that which ``casckpt.json`` in the folder names. ``fully_parallel`` and ``options``: as of our
    own `load`.
    """

    can_handle_sharded_objects = True  # they come from the store too

    def __init__(
        self,
        store: AnyStore | None = None,
        *,
        fully_parallel: bool = False,
        process_group: ProcessGroup | None = None,
        **options: Unpack[ReadArguments],
    ) -> None:
        self.store = None if store is None else as_store(store)
        self.fully_parallel, self.process_group, self.options = fully_parallel, process_group, options

    def load(self, sharded_state_dict: Nested, checkpoint_dir: Folder, async_strategy: Any = None) -> Nested:
        """The state dict with values in place of what is sharded. Raises as `casckpt.frontends.megatron.load`."""
        with _errors_of_both():
            ranks = open_ranks(self.process_group)
            stored = MegatronCheckpoint.together(ranks, lambda: self._place(checkpoint_dir))
            loading = RankLoad(stored, sharded_state_dict)

            def plan() -> tuple[list[Claim], set[str]]:
                if ranks.rank == 0:
                    check_common(stored, checkpoint_dir)
                return loading.plan("raise_unexpected")

            def decide(gathered: list[tuple[list[Claim], set[str]]]) -> list[Sharing | None]:
                claims = [claims for claims, _ in gathered]
                return [*plan_sharing(claims)] if self.fully_parallel else everyone(None, ranks.size)

            sharing = ranks.exchange(plan, decide)
            loading.read(ranks, sharing, process_group=self.process_group, **self.options)
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
            key: theirs.ShardedObject(one.key, None, one.global_shape, one.global_offset)
            for key, one in stored.objects.items()
        }
        return {**tensors_metadata(stored, theirs.ShardedTensor), **objects}

    @_errors_of_both()
    def remove_sharded_tensors(self, checkpoint_dir: Folder, key_prefix: str) -> None:
        """See `casckpt.frontends.megatron.remove_sharded_tensors`."""
        drop(self._place(checkpoint_dir), key_prefix, self.options.get("allow_pickle", False))

    @_errors_of_both()
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise CheckpointingException for what another backend wrote."""
        if loaded_backend != BACKEND:
            raise CheckpointingException(f"it was written by {loaded_backend!r}, not by {BACKEND!r}")

    @_errors_of_both()
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise CheckpointingException for what a later version wrote."""
        if loaded_version > VERSION:
            raise CheckpointingException(f"it is of version {loaded_version}; load it with a newer casckpt")

    def _place(self, folder: Folder) -> StoreRef:
        return place_in(folder, self.store)
