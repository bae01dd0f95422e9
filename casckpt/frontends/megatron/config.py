"""The attachment ``metadata.json``, which names the format of a checkpoint for Megatron."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from casckpt.errors import NotFound
from casckpt.frontends.interchange.new_files import replace_file
from casckpt.frontends.megatron.errors import CheckpointExists, checkpointing_errors
from casckpt.frontends.megatron.place import CheckpointDir, StoreRef, folder_of, place_of

CONFIG_NAME = "metadata.json"
BACKEND, VERSION = "casckpt", 1


@dataclass
class CheckpointingConfig:
    """The backends that stored the sharded part and the common part, and the versions of their formats."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


OURS = CheckpointingConfig(BACKEND, VERSION)
"""The config that `save` writes."""


def encoded(config: Any) -> bytes:
    """Encode a config as JSON: ours or Megatron-core's.

    From 0.19 on, Megatron-core's config lacks the fields of the common part.
    """
    return json.dumps({name: getattr(config, name, value) for name, value in asdict(OURS).items()}).encode()


def decoded(data: bytes) -> CheckpointingConfig | None:
    """Decode a config from JSON. Return None for any other contents. Unknown fields are ignored."""
    try:
        content = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("sharded_backend"), str):
        return None
    known = {field.name: content[field.name] for field in fields(CheckpointingConfig) if field.name in content}
    config = CheckpointingConfig(**known)
    right = all(isinstance(value, type(getattr(OURS, name))) for name, value in asdict(config).items())
    return config if right else None


def maybe_load_config(checkpoint_dir: CheckpointDir) -> CheckpointingConfig | None:
    """Return the config of a checkpoint, or of a folder that Megatron wrote. Return None if it cannot be read."""
    folder = folder_of(checkpoint_dir)
    try:
        if folder is not None:
            return decoded((folder / CONFIG_NAME).read_bytes())
        with checkpointing_errors():
            place = place_of(checkpoint_dir)
            return decoded(place.store.read_attachment(place.ref, CONFIG_NAME))
    except (NotFound, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def check_is_distributed_checkpoint(checkpoint_dir: CheckpointDir) -> bool:
    """Return whether there is a checkpoint with a valid config."""
    return maybe_load_config(checkpoint_dir) is not None


def save_config(config: CheckpointingConfig, checkpoint_dir: CheckpointDir) -> None:
    """Write a config if there is none. One process makes the call.

    `save` writes its own config, so this is rarely needed. In a store, the config becomes a checkpoint that holds
    nothing else. A `save` to the same step replaces it. Raises CheckpointExists if there is a checkpoint with a
    different config, because a committed checkpoint never changes.
    """
    folder = folder_of(checkpoint_dir)
    if folder is not None:
        replace_file(folder / CONFIG_NAME, encoded(config))
        return
    with checkpointing_errors():
        place = place_of(checkpoint_dir)
        run, step = place.run_and_step()
        if place.ref not in place.store or is_only_config(place):
            attachments = {CONFIG_NAME: encoded(config)}
            place.store.save({}, run=run, step=step, attachments=attachments, overwrite=True, no_dist=True)
        elif maybe_load_config(checkpoint_dir) != decoded(encoded(config)):
            raise CheckpointExists(
                f"{place.ref} already exists with a different config, and a committed checkpoint never changes; save "
                "to "
                "a different step"
            )


def is_only_config(place: StoreRef) -> bool:
    """Return whether there is a checkpoint that holds only the config that `save_config` wrote."""
    if place.ref not in place.store:
        return False
    found = place.store.get(place.ref)
    is_empty = not found.tensors and not found.details.objects
    return is_empty and [*place.store.attachments(found)] == [CONFIG_NAME]
