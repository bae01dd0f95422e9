"""Forgets checkpoints whose folder was removed, and removes sharded tensors from a checkpoint."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError
from casckpt.frontends.megatron.errors import CheckpointNotFound, checkpointing_errors
from casckpt.frontends.megatron.folders import POINTER_NAME, Folder
from casckpt.frontends.megatron.place import CheckpointDir, StoreRef, place_of
from casckpt.frontends.megatron.stored import MegatronCheckpoint, read_values
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.store.store import Store
from casckpt.tensors.state import OfObjects

FOLDER = "megatron_folder"
"""The key in the metadata of a checkpoint for the folder that it was saved from."""

log = logging.getLogger(__name__)


def forget_removed(
    store: AnyStore, folder: Folder, *, run: str | None = None, dry_run: bool = False
) -> list[Checkpoint]:
    """Forget the checkpoints whose folder was removed. One process makes the call. Until a gc, they can be restored.

    ``folder``: the parent of a training's folders ``iter_0000100`` and so on (``--save``, or ``non_persistent`` in it).
    Only checkpoints that a `CasSaveShardedStrategy` saved from a folder directly in it count. Checkpoints with a tag
    stay. ``run``: only this run. ``dry_run``: return the checkpoints without forgetting them.

    Raises CheckpointingException (also a NotFound) if no folder there names this store: the disk may be unmounted.
    """
    with checkpointing_errors():
        opened, parent = as_store(store), os.path.realpath(folder)
        if not any(_names(path, opened) for path in Path(parent).glob(f"*/{POINTER_NAME}")):
            raise CheckpointNotFound(
                f"no folder in {parent} names a checkpoint of {opened.url}: is it mounted? Nothing was forgotten"
            )
        gone = [saved for saved in opened.checkpoints(run) if _is_gone(saved, parent) and not saved.tags]
        return opened.forget(*gone, dry_run=dry_run) if gone else []


def follow(store: Store, folder: Path, run: str) -> None:
    """Run `forget_removed` after a save into ``folder``. Errors are only logged, because the save succeeded."""
    try:
        for checkpoint in forget_removed(store, folder.parent, run=run):
            log.info("forgot %r: its folder is gone", checkpoint)
    except (CasckptError, OSError) as error:
        log.warning("what was saved from folders that are gone was not forgotten: %s", error)


def folder_noted(folder: Folder) -> dict[str, str]:
    """The metadata that notes the folder of a checkpoint."""
    path = Path(folder)
    return {FOLDER: os.path.join(os.path.realpath(path.parent), path.name)}


def _names(pointer: Path, store: Store) -> bool:
    try:
        return bool(json.loads(pointer.read_bytes())["store"] == store.url)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, TypeError, KeyError):
        return False


def _is_gone(checkpoint: Checkpoint, parent: str) -> bool:
    """Whether the checkpoint's folder in ``parent`` does not exist. Any other answer of the file system is a no."""
    folder = checkpoint.metadata.get(FOLDER)
    if not isinstance(folder, str) or os.path.dirname(folder) != parent:
        return False
    try:
        os.lstat(folder)
    except FileNotFoundError:
        return True
    return False


def remove_sharded_tensors(checkpoint_dir: CheckpointDir, key_prefix: str, *, allow_pickle: bool = False) -> None:
    """Replace a checkpoint by one without the tensors and objects whose key begins with ``key_prefix``.

    One process makes the call. It reads the remaining values into memory, but writes no cell again. The replaced
    checkpoint is forgotten, and gc deletes the blobs that only it needs. Logs a warning if there is no such key. Raises
    CheckpointingException (also a NotFound) if there is no checkpoint, or for a pickle without ``allow_pickle``.
    """
    with checkpointing_errors():
        drop(place_of(checkpoint_dir), key_prefix, allow_pickle)


def drop(place: StoreRef, key_prefix: str, allow_pickle: bool) -> None:
    """See `remove_sharded_tensors`."""
    stored = MegatronCheckpoint.read(place)
    keys = stored.flat_keys()
    kept = [key for key, name in keys.items() if name is None or not name.startswith(key_prefix)]
    if len(kept) == len(keys):
        log.warning("%s has nothing sharded whose key begins with %r: nothing was removed", stored.where, key_prefix)
        return
    state = OfObjects(stored.inflated(read_values(stored, kept, allow_pickle=allow_pickle)))
    store, old = stored.store, stored.checkpoint
    files = {name: store.read_attachment(old, name) for name in store.attachments(old)}
    store.save(
        state, run=old.run, step=old.step, overwrite=True, metadata=old.metadata, metrics=old.metrics,
        healthy=old.healthy, health=old.commit.committed.health is not None, ephemeral=old.ephemeral,
        attachments=files, allow_pickle=allow_pickle, no_dist=True,
    )  # fmt: skip
