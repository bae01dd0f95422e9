"""Removal: folders that are gone are followed by the store, and a checkpoint loses some of its sharded tensors."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
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
"""In the metadata of a checkpoint: the folder that it was saved from."""

log = logging.getLogger(__name__)


def forget_removed(
    store: AnyStore, folder: Folder, *, run: str | None = None, dry_run: bool = False
) -> list[Checkpoint]:
    """Forget the checkpoints whose folder is gone; one process makes the call. They may be restored until a gc.

    ``folder``: what holds the folders of a training, ``iter_0000100`` and so on (``--save``, or its
    ``non_persistent``). Only what a `CasSaveShardedStrategy` saved from a folder right in there is looked at; tags keep
    theirs. ``run``: of this one only. ``dry_run``: only say which.

    Raises CheckpointingException (also a NotFound) if there is none that names this store: the disk may be unmounted.
    """
    with checkpointing_errors():
        opened, parent = as_store(store), os.path.realpath(folder)
        if not any(_names(path, opened) for path in _pointers(parent)):
            raise CheckpointNotFound(
                f"no folder in {parent} names a checkpoint of {opened.url}: is it mounted? Nothing was forgotten"
            )
        gone = [one for one in opened.checkpoints(run) if _is_gone(one, parent) and not one.tags]
        return opened.forget(*gone, dry_run=dry_run) if gone else []


def follow(store: Store, folder: Path, run: str) -> None:
    """The same after a save into ``folder``: what goes wrong is logged, as the checkpoint is there."""
    try:
        for one in forget_removed(store, folder.parent, run=run):
            log.info("forgot %r: its folder is gone", one)
    except (CasckptError, OSError) as error:
        log.warning("what was saved from folders that are gone was not forgotten: %s", error)


def folder_noted(folder: Folder) -> dict[str, str]:
    """Give what the metadata of a checkpoint says of its folder."""
    path = Path(folder)
    return {FOLDER: os.path.join(os.path.realpath(path.parent), path.name)}


def _pointers(parent: str) -> Iterator[Path]:
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        names = []
    return (Path(parent, name, POINTER_NAME) for name in names)


def _names(pointer: Path, store: Store) -> bool:
    try:
        return bool(json.loads(pointer.read_bytes())["store"] == store.url)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, TypeError, KeyError):
        return False


def _is_gone(one: Checkpoint, parent: str) -> bool:
    """Only what the file system says is not there is gone: whatever else it says, nobody knows."""
    folder = one.metadata.get(FOLDER)
    if not isinstance(folder, str) or os.path.dirname(folder) != parent:
        return False
    try:
        os.lstat(folder)
    except FileNotFoundError:
        return True
    return False


def remove_sharded_tensors(checkpoint_dir: CheckpointDir, key_prefix: str, *, allow_pickle: bool = False) -> None:
    """Replace a checkpoint by one without the tensors and objects whose key begins with ``key_prefix``.

    One process makes the call; what stays goes through its memory, and is not written again. The checkpoint that was
    there is forgotten; the next gc frees what nothing else needs. Logs a warning if there is no such key. Raises
    CheckpointingException (also a NotFound) if there is no checkpoint, or for a pickle without ``allow_pickle``.
    """
    with checkpointing_errors():
        drop(place_of(checkpoint_dir), key_prefix, allow_pickle)


def drop(place: StoreRef, key_prefix: str, allow_pickle: bool) -> None:
    """See `remove_sharded_tensors`."""
    stored = MegatronCheckpoint.read(place)
    every = stored.flat_keys()
    kept = [key for key, name in every.items() if name is None or not name.startswith(key_prefix)]
    if len(kept) == len(every):
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
