"""The folder that Megatron-core keeps for a checkpoint in a store: ``metadata.json``, ``common.pt``, ``casckpt.json``.

``casckpt.json`` names the checkpoint in the store. The checkpoint's attachment ``common.pt`` is identical to the file.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TypeAlias

from casckpt.errors import NotFound
from casckpt.frontends.interchange.new_files import replace_file
from casckpt.frontends.megatron.common import COMMON_NAME
from casckpt.frontends.megatron.config import CONFIG_NAME, OURS, encoded, maybe_load_config
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors
from casckpt.frontends.megatron.place import CheckpointDir, StoreRef, place_of
from casckpt.frontends.megatron.stored import MegatronCheckpoint, load_common_state_dict, read_values
from casckpt.tensors.objects import write_archive
from casckpt.tensors.values import OfObjects

POINTER_NAME = "casckpt.json"
_TORCH_DIST = ".metadata"  # the file that Megatron-core's own strategy writes last

Folder: TypeAlias = str | os.PathLike[str]


def write_folder(checkpoint_dir: CheckpointDir, folder: Folder, *, allow_pickle: bool = False) -> None:
    """Write the folder from which Megatron-core loads a checkpoint. One process makes the call.

    Use it for checkpoints from other front ends, or if the folder that `CasSaveShardedStrategy` wrote is lost.
    ``allow_pickle``: see `load_common_state_dict`. Raises CheckpointingException (also a NotFound) if there is no
    checkpoint.
    """
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir), common=True)
        common = stored.file or write_archive(load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle))
        target = Path(folder)
        point(target, StoreRef(stored.store, stored.where), common)
        replace_file(target / CONFIG_NAME, encoded(maybe_load_config(checkpoint_dir) or OURS))


def point(folder: Path, place: StoreRef, common: bytes | None) -> None:
    """Write the checkpoint's location into a folder.

    ``common``: the contents for common.pt, or None to keep the file.
    """
    run, step = place.run_and_step()
    if common is not None:
        replace_file(folder / COMMON_NAME, common)
    replace_file(folder / POINTER_NAME, json.dumps({"store": place.store.url, "run": run, "step": step}).encode())
    (folder / _TORCH_DIST).unlink(missing_ok=True)  # of an earlier checkpoint, which Megatron would otherwise load


def is_pointed(folder: Folder) -> bool:
    """Return whether a folder names a checkpoint in a store and torch_dist has not overwritten it since."""
    return Path(folder, POINTER_NAME).exists() and not Path(folder, _TORCH_DIST).exists()


def pointed_at(folder: Folder) -> tuple[str, str]:
    """Return the (store URL, reference) that a folder names. Raises NotFound or CheckpointingException."""
    path = Path(folder, POINTER_NAME)
    if path.exists() and not is_pointed(folder):
        raise CheckpointingException(f"torch_dist has overwritten {folder}: load it with Megatron-core's own strategy")
    try:
        pointer = json.loads(path.read_bytes())
        url, ref = pointer["store"], f"{pointer['run']}@{pointer['step']}"
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist: the checkpoint was not saved with CasSaveShardedStrategy") from error
    except (ValueError, TypeError, KeyError, IsADirectoryError) as error:
        raise CheckpointingException(f"{path} does not specify where the checkpoint is: {error!r}") from error
    if not isinstance(url, str):
        raise CheckpointingException(f"{path} does not specify where the checkpoint is; its store is {url!r}")
    return url, ref


def check_common(stored: MegatronCheckpoint, folder: Folder) -> None:
    """Raise CheckpointingException if common.pt in the folder, which Megatron reads, belongs to another save."""
    path = Path(folder, COMMON_NAME)
    if COMMON_NAME not in stored.store.attachments(stored.checkpoint) or not path.exists():
        return
    if path.read_bytes() != stored.store.read_attachment(stored.checkpoint, COMMON_NAME):
        raise CheckpointingException(
            f"{path} is not the file that was saved with {stored.where}. A later save into the folder did not "
            f"finish, or the file was changed; write_folder({f'{stored.store.url}#{stored.where}'!r}, "
            f"{os.fspath(folder)!r}) restores the saved file"
        )


log = logging.getLogger(__name__)


def remove_sharded_tensors(checkpoint_dir: CheckpointDir, key_prefix: str, *, allow_pickle: bool = False) -> None:
    """Replace a checkpoint with one that lacks the tensors and objects whose key begins with ``key_prefix``.

    One process makes the call. It reads the remaining values into memory, but does not rewrite any cell. The replaced
    checkpoint is forgotten, and gc deletes the blobs that only this checkpoint needs. Logs a warning if no key has
    this prefix. Raises CheckpointingException (also a NotFound) if there is no checkpoint, or for a pickle without
    ``allow_pickle``.
    """
    with checkpointing_errors():
        drop(place_of(checkpoint_dir), key_prefix, allow_pickle)


def drop(place: StoreRef, key_prefix: str, allow_pickle: bool) -> None:
    """See `remove_sharded_tensors`."""
    stored = MegatronCheckpoint.read(place)
    keys = stored.flat_keys()
    kept = [key for key, name in keys.items() if name is None or not name.startswith(key_prefix)]
    if len(kept) == len(keys):
        log.warning("%s has no sharded value whose key begins with %r: nothing was removed", stored.where, key_prefix)
        return
    state = OfObjects(stored.inflated(read_values(stored, kept, allow_pickle=allow_pickle)))
    store, old = stored.store, stored.checkpoint
    files = {name: store.read_attachment(old, name) for name in store.attachments(old)}
    store.save(
        state, run=old.run, step=old.step, overwrite=True, metadata=old.metadata, metrics=old.metrics,
        healthy=old.healthy, health=old.commit.committed.health is not None, ephemeral=old.ephemeral,
        attachments=files, allow_pickle=allow_pickle, no_dist=True,
    )  # fmt: skip
