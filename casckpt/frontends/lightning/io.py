"""Lightning: its checkpoints lie in a store, and where it looks for a file there is a small one that names them.

::

    Trainer(plugins=[CasCheckpointIO(store, run="sft")], callbacks=[ModelCheckpoint(save_top_k=2, save_last=True)])
    trainer.fit(model, ckpt_path="last")              # or a path, "best", or a reference into the store: "sft@latest"

In the store: weights under ``model``, as every front end has them, and all else under ``lightning``. Each file has a
tag, so that no policy of the store forgets what Lightning wants to keep; what Lightning removes is forgotten.

`LightningModule.load_from_checkpoint` and the strategies FSDP, ModelParallel and DeepSpeed read files by themselves:
`restore_checkpoint` makes one for them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.utilities.cloud_io import get_filesystem
except ImportError as error:
    raise ImportError("casckpt.frontends.lightning needs Lightning: pip install 'casckpt[lightning]'") from error

from casckpt.checkpoint.handle import Checkpoint
from casckpt.errors import CasckptError, InvalidInput, NotFound
from casckpt.format.digest import hex_digest
from casckpt.format.keys import check_run
from casckpt.frontends.new_files import new_file
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.trainer.janitor import Janitor

AnyPath: TypeAlias = str | os.PathLike[str]

log = logging.getLogger(__name__)

WEIGHTS, REST = "model", "lightning"
_MAGIC = "casckpt"
_MAX_POINTER = 1 << 16


class CasCheckpointIO(CheckpointIO):
    """For ``Trainer(plugins=[...])`` and ``Fabric(plugins=[...])``.

    The step is Lightning's global step. A second file of one step (``last.ckpt`` beside one of the best) is a
    checkpoint of the run ``<run>/<name of the file>``, and costs nothing.

    ``async_save``: save in the background, one at a time. What is removed meanwhile waits for that, so that
    ``save_top_k`` holds; what fails is logged, and raised at the end. (Lightning's own AsyncCheckpointIO must not be
    put around this one.) ``gc``: after a removal, delete what nobody needs. ``allow_pickle``: for hyperparameters and
    states of callbacks that are not plain data.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str,
        async_save: bool = False,
        gc: bool = False,
        allow_pickle: bool = False,
        threads: int | None = None,
    ) -> None:
        self.store, self.run = as_store(store), check_run(run)
        self._async, self._gc = async_save, gc
        self._options: dict[str, Any] = {"no_dist": True, "allow_pickle": allow_pickle, "threads": threads}
        self._files = TorchCheckpointIO()
        self._queue: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        self._janitor = Janitor(self.store, self.run)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None) -> None:
        """Save what Lightning gives, and put a file that names it at ``path``. Rank 0 makes the call."""
        if storage_options is not None:
            raise InvalidInput("storage_options of save_checkpoint go to casckpt.open; leave them out here")
        self._settle()
        pointer = Pointer(path)
        before = pointer.read()
        state, step = _to_state(checkpoint), self._step_of(checkpoint)
        run, overwrite = self._place(pointer, step)
        options: dict[str, Any] = {"run": run, "step": step, "overwrite": overwrite, **self._options}
        if not self._async:
            self._finish(pointer, before, self.store.save(state, **options))
            return
        saving = self.store.save_async(state, **options)
        if before is None:
            pointer.write({"run": run, "step": step})  # so that Lightning gives the name to nobody else
        self._later(lambda: self._finish_async(pointer, before, saving))

    def load_checkpoint(
        self, path: AnyPath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What was saved there; of a file that Lightning wrote by itself, its contents.

        ``path`` may also be a reference into the store. ``weights_only`` says nothing here: no pickle is loaded, unless
        ``allow_pickle`` was given. Every rank makes the call. Raises NotFound, a FileNotFoundError.
        """
        self._settle()
        pointer = Pointer(path)
        if pointer.is_foreign():
            more = {} if map_location is None else {"map_location": map_location}
            loaded: dict[str, Any] = self._files.load_checkpoint(Path(path), weights_only=weights_only, **more)
            return loaded
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        options = {name: self._options[name] for name in ("allow_pickle", "threads")}
        return _from_state(self.store.read(self._named(pointer), device=device, **options))

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Remove the file, and forget the checkpoint if no other file names it."""
        if self._async:
            self._later(lambda: self._remove(Pointer(path)))
        else:
            self._remove(Pointer(path))

    def teardown(self) -> None:
        """Wait for what is in the background. Raises what it raised, if nobody was told."""
        waiting, self._waiting = self._waiting, []
        if self._queue is not None:
            self._queue.shutdown()
            self._queue = None
        self._janitor.close()
        for one in waiting:
            one.result()

    # inside

    def _step_of(self, checkpoint: Mapping[str, Any]) -> int:
        """Of a Trainer its global step; a Fabric's states are numbered."""
        if isinstance(checkpoint.get("global_step"), int):
            return int(checkpoint["global_step"])
        return max((one.step + 1 for one in self._checkpoints()), default=0)

    def _checkpoints(self) -> list[Checkpoint]:
        return self.store.checkpoints(self.run) if self.store.repository.exists() else []

    def _place(self, pointer: Pointer, step: int) -> tuple[str, bool]:
        """(run, overwrite) to save with. A checkpoint that only this file names, or none, is replaced."""
        there = next((one for one in self._checkpoints() if one.step == step), None)
        if there is None or set(there.tags) <= {pointer.tag}:
            return self.run, there is not None
        return f"{self.run}/{pointer.name}", True

    def _finish(self, pointer: Pointer, before: str | None, saved: Checkpoint) -> None:
        """The tag before the file: what a file names is kept. Then what the file named before is let go."""
        self.store.tag(pointer.tag, saved)
        pointer.write({"store": self.store.url, "run": saved.run, "step": saved.step, "id": saved.id})
        if before not in (None, saved.id):
            self._let_go(before)

    def _finish_async(self, pointer: Pointer, before: str | None, saving: Future[Checkpoint]) -> None:
        try:
            saved = saving.result()
        except CasckptError:
            if before is None:
                pointer.delete()
            raise
        self._finish(pointer, before, saved)

    def _remove(self, pointer: Pointer) -> None:
        if pointer.is_foreign():
            self._files.remove_checkpoint(Path(pointer.path))
            return
        named = pointer.read()
        pointer.delete()
        if self.store.repository.exists():
            if pointer.tag in self.store.tags():
                self.store.untag(pointer.tag)
            self._let_go(named)

    def _let_go(self, named: str | None) -> None:
        """Forget a checkpoint that no tag names any more."""
        if named is not None and named in self.store:
            found = self.store.get(named)
            if not found.tags and not found.forgotten:
                self.store.forget(found)
            if self._gc:
                self._janitor.ask()

    def _named(self, pointer: Pointer) -> str:
        named = pointer.read()
        if named is not None:
            return named
        if pointer.is_pending():
            raise NotFound(f"{pointer.path} names a save that did not end; load another one, or {self.run}@latest")
        return os.fspath(pointer.path)  # a reference, or the error that says what there is

    def _later(self, call: Callable[[], None]) -> None:
        self._queue = self._queue or ThreadPoolExecutor(1, thread_name_prefix="casckpt-lightning")
        self._waiting.append(self._queue.submit(call))

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            error = one.exception()
            if error is not None:
                log.error("a save or removal in the background failed: %s", error)


def restore_checkpoint(store: AnyStore, ref: str | Checkpoint, path: AnyPath, *, force: bool = False) -> Path:
    """Write a checkpoint as a file of Lightning's own, for all that reads files by itself.

    ``force``: over what is there. Raises NotFound, Conflict.
    """
    checkpoint = _from_state(as_store(store).read(ref))
    target = Path(path)
    with new_file(target, force=force) as temporary:
        torch.save(checkpoint, temporary)
    return target


def _to_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(checkpoint)
    weights = rest.pop("state_dict", None)
    return {REST: rest} if weights is None else {WEIGHTS: weights, REST: rest}


def _from_state(state: Mapping[str, Any]) -> dict[str, Any]:
    if REST not in state:  # another front end's: weights alone
        return {"state_dict": dict(state.get(WEIGHTS, state))}
    found = dict(state[REST])
    return {**found, "state_dict": state[WEIGHTS]} if WEIGHTS in state else found


@dataclass(frozen=True)
class Pointer:
    """The small file at a path, local or remote, that names a checkpoint."""

    path: AnyPath

    @property
    def name(self) -> str:
        """Of the file, as the name of a run can hold it."""
        stem = os.fspath(self.path).rpartition("/")[2].removesuffix(".ckpt")
        return re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:60] or "file"

    @property
    def tag(self) -> str:
        """The tag that stands for the file: of its whole path."""
        path = os.fspath(self.path)
        whole = path if "://" in path else os.path.abspath(path)
        return f"lightning.{hex_digest(whole.encode())[:16]}.{self.name.lower()}"[:100]

    @property
    def _files(self) -> Any:
        return get_filesystem(os.fspath(self.path))

    def exists(self) -> bool:
        """Is there any file?"""
        return bool(self._files.isfile(os.fspath(self.path)))

    def read(self) -> str | None:
        """The id of the checkpoint; None if there is no file, another one, or one of a save that has not ended."""
        found = self._contents()
        return found.get("id") if found is not None else None

    def is_foreign(self) -> bool:
        """Is there a file that is none of ours?"""
        return self.exists() and self._contents() is None

    def is_pending(self) -> bool:
        """Does it stand for a save that has not ended?"""
        found = self._contents()
        return found is not None and "id" not in found

    def _contents(self) -> dict[str, Any] | None:
        if not self.exists():
            return None
        with self._files.open(os.fspath(self.path), "rb") as file:
            data = file.read(_MAX_POINTER)
        try:
            found = json.loads(data)[_MAGIC]
        except (ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, contents: Mapping[str, Any]) -> None:
        """Put the file there, whole or not at all."""
        files, path = self._files, os.fspath(self.path)
        folder = os.path.dirname(path)
        if folder:
            files.makedirs(folder, exist_ok=True)
        data = json.dumps({_MAGIC: contents}, indent=2).encode() + b"\n"
        if "://" in path:
            files.pipe_file(path, data)
            return
        with new_file(Path(path), force=True) as temporary:
            temporary.write_bytes(data)

    def delete(self) -> None:
        """Remove the file, if it is there."""
        if self.exists():
            self._files.rm_file(os.fspath(self.path))


__all__ = ["CasCheckpointIO", "restore_checkpoint"]
