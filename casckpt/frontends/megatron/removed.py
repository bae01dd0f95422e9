"""The store follows where Megatron-core removes folders: ``--save-retain-interval``, non-persistent checkpoints."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.store import Store
from casckpt.errors import CasckptError
from casckpt.frontends.megatron.errors import CheckpointNotFound, checkpointing_errors
from casckpt.frontends.megatron.folders import POINTER_NAME, Folder
from casckpt.frontends.stores import AnyStore, as_store

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
    """What the metadata of a checkpoint says of its folder."""
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
