"""The folder that Megatron-core keeps for a checkpoint in a store: ``metadata.json``, ``common.pt``, ``casckpt.json``.

``casckpt.json`` names the checkpoint in the store. The attachment ``common.pt`` of the checkpoint equals the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeAlias

from casckpt.errors import NotFound
from casckpt.frontends.interchange.new_files import new_file
from casckpt.frontends.megatron.common import COMMON_NAME
from casckpt.frontends.megatron.config import CONFIG_NAME, OURS, encoded, maybe_load_config
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors
from casckpt.frontends.megatron.place import CheckpointDir, StoreRef, place_of
from casckpt.frontends.megatron.reading import load_common_state_dict
from casckpt.frontends.megatron.stored import MegatronCheckpoint
from casckpt.tensors.objects import write_archive

POINTER_NAME = "casckpt.json"
_TORCH_DIST = ".metadata"  # the file that Megatron-core's own strategy writes last

Folder: TypeAlias = str | os.PathLike[str]


def write_folder(checkpoint_dir: CheckpointDir, folder: Folder, *, allow_pickle: bool = False) -> None:
    """Write the folder from which Megatron-core loads a checkpoint. One process makes the call.

    Use it for checkpoints of other front ends, or if the folder of `CasSaveShardedStrategy` is lost. ``allow_pickle``:
    see `load_common_state_dict`. Raises CheckpointingException (also a NotFound) if there is no checkpoint.
    """
    with checkpointing_errors():
        stored = MegatronCheckpoint.read(place_of(checkpoint_dir), common=True)
        common = stored.file or write_archive(load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle))
        target = Path(folder)
        point(target, StoreRef(stored.store, stored.where), common)
        _write(target / CONFIG_NAME, encoded(maybe_load_config(checkpoint_dir) or OURS))


def point(folder: Path, place: StoreRef, common: bytes | None) -> None:
    """Write the place of the checkpoint into a folder. ``common``: contents for common.pt; None keeps the file."""
    run, step = place.run_and_step()
    if common is not None:
        _write(folder / COMMON_NAME, common)
    _write(folder / POINTER_NAME, json.dumps({"store": place.store.url, "run": run, "step": step}).encode())
    (folder / _TORCH_DIST).unlink(missing_ok=True)  # of an earlier checkpoint, which Megatron would load


def is_pointed(folder: Folder) -> bool:
    """Whether a folder names a checkpoint in a store, and torch_dist has not written over it since."""
    return Path(folder, POINTER_NAME).exists() and not Path(folder, _TORCH_DIST).exists()


def pointed_at(folder: Folder) -> tuple[str, str]:
    """(URL of the store, reference) that a folder names. Raises NotFound, CheckpointingException."""
    path = Path(folder, POINTER_NAME)
    if path.exists() and not is_pointed(folder):
        raise CheckpointingException(f"torch_dist has written over {folder}: load it with Megatron-core's own strategy")
    try:
        pointer = json.loads(path.read_bytes())
        url, ref = pointer["store"], f"{pointer['run']}@{pointer['step']}"
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there: the checkpoint was not saved by a CasSaveShardedStrategy") from error
    except (ValueError, TypeError, KeyError, IsADirectoryError) as error:
        raise CheckpointingException(f"{path} does not say where the checkpoint is: {error!r}") from error
    if not isinstance(url, str):
        raise CheckpointingException(f"{path} does not say where the checkpoint is: the store is {url!r}")
    return url, ref


def check_common(stored: MegatronCheckpoint, folder: Folder) -> None:
    """Raise CheckpointingException if common.pt in the folder, which Megatron reads, belongs to another save."""
    path = Path(folder, COMMON_NAME)
    if COMMON_NAME not in stored.store.attachments(stored.checkpoint) or not path.exists():
        return
    if path.read_bytes() != stored.store.read_attachment(stored.checkpoint, COMMON_NAME):
        raise CheckpointingException(
            f"{path} is not the one that was saved with {stored.where}: a later save into the folder did not end, or "
            f"it was changed; write_folder({f'{stored.store.url}#{stored.where}'!r}, {os.fspath(folder)!r}) puts back "
            "what was saved"
        )


def _write(path: Path, data: bytes) -> None:
    with new_file(path, force=True) as temporary:
        temporary.write_bytes(data)
