"""Strategies for Megatron-core's own ``save`` and ``load``. Importing this module imports Megatron-core.

Megatron keeps a folder for each checkpoint, with ``metadata.json`` and ``common.pt``; the tensors and objects go into
the store, and ``casckpt.json`` in the folder says where. ``common.pt`` goes along as an attachment, so that the
checkpoint in the store is whole without the folder.

Up to 0.16, Megatron takes any subclass of its base strategies, and `register_strategies` lets it find ours by
``metadata.json``. From 0.17 on it replaces all but subclasses of its own torch_dist strategy by that, and takes for a
load whatever has a ``load``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from megatron.core.dist_checkpointing import mapping as theirs
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from casckpt.checkpoint.ranks import Ranks, everyone, open_ranks
from casckpt.errors import NotFound
from casckpt.frontends.megatron import mapping as ours
from casckpt.frontends.megatron.config import BACKEND, VERSION
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors
from casckpt.frontends.megatron.integrity import Claim
from casckpt.frontends.megatron.loading import Loading
from casckpt.frontends.megatron.nesting import Nested
from casckpt.frontends.megatron.place import Place
from casckpt.frontends.megatron.reading import tensors_metadata
from casckpt.frontends.megatron.saving import Saving, background
from casckpt.frontends.megatron.sharing import Sharing, plan_sharing
from casckpt.frontends.megatron.stored import COMMON_NAME, Stored
from casckpt.frontends.new_files import new_file
from casckpt.frontends.stores import AnyStore, as_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

POINTER_NAME = "casckpt.json"
_COMMON_KEY = "common_state"  # the object that the common part is from Megatron-core 0.19 on
_NUMBER = re.compile(r"[0-9]+$")

Folder: TypeAlias = str | os.PathLike[str]
StepOf: TypeAlias = int | Callable[[Path], int] | None

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


class CasSaveShardedStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc] # Megatron-core has no types
    """Saves into a store: ``dist_checkpointing.save(state, folder, sharded_strategy=CasSaveShardedStrategy(...))``.

    ``step``: of all saves, or a function of the folder; None: the number at the end of its name (``iter_0000100``).
    ``overwrite``: a step that exists is replaced, as Megatron writes over a folder: a training that was rolled back
    comes to it again. ``fully_parallel``, ``options``: see `casckpt.frontends.megatron.save`. One strategy serves many
    saves.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str,
        step: StepOf = None,
        fully_parallel: bool = False,
        overwrite: bool = True,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        # That of the base class takes other arguments in each version, and nothing that it sets is used.
        self.backend, self.version = BACKEND, VERSION
        self.store = as_store(store)
        self.run, self.step = run, step
        self.fully_parallel, self.overwrite = fully_parallel, overwrite
        self.process_group, self.options = process_group, options

    @property
    def can_handle_sharded_objects(self) -> bool:
        """They go into the store too."""
        return True

    def save(self, sharded_state_dict: Nested, checkpoint_dir: Folder) -> None:
        """Save, and return once it is committed. Raises as `casckpt.frontends.megatron.save`."""
        with _errors_of_both():
            saving, options, finish = self._prepared(sharded_state_dict, Path(checkpoint_dir))
            self.store.save(saving.state, **options)
            finish()

    def async_save(self, sharded_state_dict: Nested, checkpoint_dir: Folder) -> async_utils.AsyncRequest:
        """Copy the tensors, begin to save, and return a request whose finalize_fns wait for the end."""
        with _errors_of_both():
            saving, options, finish = self._prepared(sharded_state_dict, Path(checkpoint_dir))
            wait = background(self.store, saving.state, options)

        def finalize() -> None:
            with _errors_of_both():
                wait()
                finish()

        return async_utils.AsyncRequest(None, (), [finalize])

    def _prepared(self, state: Nested, folder: Path) -> tuple[Saving, dict[str, Any], Callable[[], None]]:
        """This rank's part, the arguments of `Store.save`, and what is to be done when that is through."""
        ranks = open_ranks(self.process_group)
        saving = Saving(state, ranks.rank, fully_parallel=self.fully_parallel)
        files: dict[str, bytes] = {}

        def locate() -> Place:
            if ranks.rank == 0:
                files[COMMON_NAME] = _common_file(state, folder)
            return Place(self.store, f"{self.run}@{self._step(folder)}")

        place, replaces = saving.agree(ranks, locate, validate=False, preprocess=None)
        saving.leave_out(_COMMON_KEY)
        run, step = place.run_and_step()
        given = {
            **self.options, "run": run, "step": step, "process_group": self.process_group,
            "attachments": {**self.options.get("attachments", {}), **saving.files, **files},
            "overwrite": self.overwrite or replaces,
        }  # fmt: skip
        pointer = json.dumps({"store": self.store.url, "run": run, "step": step}).encode()
        return saving, given, lambda: _point(ranks, folder, pointer)

    def _step(self, folder: Path) -> int:
        if isinstance(self.step, int):
            return self.step
        if self.step is not None:
            return self.step(folder)
        found = _NUMBER.search(folder.name)
        if not found:
            raise CheckpointingException(f"{folder} does not end in a number; give the strategy step=, or a function")
        return int(found[0])


def _common_file(state: Nested, folder: Path) -> bytes:
    """What is in common.pt; it is written here where Megatron hands the common part over as an object."""
    path = folder / COMMON_NAME
    common = state.get(_COMMON_KEY) if isinstance(state, dict) else None
    if common is not None and not path.exists():
        with new_file(path, force=True) as temporary:
            torch.save(common.data, temporary)
    return path.read_bytes()


def _point(ranks: Ranks, folder: Path, pointer: bytes) -> None:
    """Say in the folder where the checkpoint is."""

    def write() -> None:
        if ranks.rank == 0:
            with new_file(folder / POINTER_NAME, force=True) as path:
                path.write_bytes(pointer)

    ranks.exchange(write, lambda done: done)


class CasLoadShardedStrategy:
    """Loads from a store: ``dist_checkpointing.load(state, folder, sharded_strategy=CasLoadShardedStrategy())``.

    ``store``: None, that which ``casckpt.json`` in the folder names. ``fully_parallel`` and ``options``: as of our
    own `load`.
    """

    def __init__(
        self,
        store: AnyStore | None = None,
        *,
        fully_parallel: bool = False,
        process_group: ProcessGroup | None = None,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        self.store = None if store is None else as_store(store)
        self.fully_parallel, self.process_group = fully_parallel, process_group
        self.allow_pickle, self.options = allow_pickle, options

    @property
    def can_handle_sharded_objects(self) -> bool:
        """They come from the store too."""
        return True

    def load(self, sharded_state_dict: Nested, checkpoint_dir: Folder, async_strategy: Any = None) -> Nested:
        """The state dict with values in place of what is sharded. Raises as `casckpt.frontends.megatron.load`."""
        with _errors_of_both():
            ranks = open_ranks(self.process_group)
            stored = Stored.together(ranks, lambda: self._place(checkpoint_dir))
            loading = Loading(stored, sharded_state_dict)

            def decide(gathered: list[tuple[list[Claim], set[str]]]) -> list[Sharing | None]:
                claims = [claims for claims, _ in gathered]
                return [*plan_sharing(claims)] if self.fully_parallel else everyone(None, ranks.size)

            sharing = ranks.exchange(lambda: loading.plan("raise_unexpected"), decide)
            loading.read(
                ranks, sharing, process_group=self.process_group, allow_pickle=self.allow_pickle, **self.options
            )
        return loading.loaded()

    def load_tensors_metadata(self, checkpoint_dir: Folder, metadata: Any = None) -> dict[str, Any]:
        """See `casckpt.frontends.megatron.load_tensors_metadata`."""
        with _errors_of_both():
            return tensors_metadata(Stored.read(self._place(checkpoint_dir)), theirs.ShardedTensor)

    def load_sharded_metadata(self, checkpoint_dir: Folder) -> dict[str, Any]:
        """See `casckpt.frontends.megatron.load_sharded_metadata`."""
        with _errors_of_both():
            stored = Stored.read(self._place(checkpoint_dir))
            objects = {
                key: theirs.ShardedObject(one.key, None, one.global_shape, one.global_offset)
                for key, one in stored.objects.items()
            }
            return {**tensors_metadata(stored, theirs.ShardedTensor), **objects}

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise CheckpointingException for what another backend wrote."""
        if loaded_backend != BACKEND:
            with _errors_of_both():
                raise CheckpointingException(f"it was written by {loaded_backend!r}, not by {BACKEND!r}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise CheckpointingException for what a later version wrote."""
        if loaded_version > VERSION:
            with _errors_of_both():
                raise CheckpointingException(f"it is of version {loaded_version}; load it with a newer casckpt")

    def _place(self, folder: Folder) -> Place:
        path = Path(folder) / POINTER_NAME
        try:
            found = json.loads(path.read_bytes())
            store, ref = found["store"], f"{found['run']}@{found['step']}"
        except FileNotFoundError as error:
            raise NotFound(f"{path} is not there: the checkpoint was not saved by a CasSaveShardedStrategy") from error
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointingException(f"{path} does not say where the checkpoint is: {error!r}") from error
        return Place(self.store or as_store(store), ref)


def register_strategies(store: AnyStore | None = None) -> None:
    """Let Megatron-core up to 0.16 find the strategy by itself: ``dist_checkpointing.load(state, folder)``.

    Raises CheckpointingException for a later one, which has no registry.
    """
    from megatron.core.dist_checkpointing.strategies import base

    if not hasattr(base, "register_default_strategy"):
        raise CheckpointingException("Megatron-core has no registry any more; give it a CasLoadShardedStrategy()")
    base.LoadShardedStrategy.register(CasLoadShardedStrategy)
    strategy = CasLoadShardedStrategy(store)
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, BACKEND, VERSION, strategy)
