"""A checkpoint without some of its sharded tensors: one process reads what stays, and saves it to the same place."""

from __future__ import annotations

import logging

from casckpt.frontends.megatron.errors import checkpointing_errors
from casckpt.frontends.megatron.place import CheckpointDir, Place, place_of
from casckpt.frontends.megatron.stored import Request, Stored

log = logging.getLogger(__name__)


def remove_sharded_tensors(checkpoint_dir: CheckpointDir, key_prefix: str, *, allow_pickle: bool = False) -> None:
    """Replace a checkpoint by one without the tensors and objects whose key begins with ``key_prefix``.

    One process makes the call; what stays goes through its memory, and is not written again. The checkpoint that was
    there is forgotten; the next gc frees what nothing else needs. Logs a warning if there is no such key. Raises
    CheckpointingException (also a NotFound) if there is no checkpoint, or for a pickle without ``allow_pickle``.
    """
    with checkpointing_errors():
        drop(place_of(checkpoint_dir), key_prefix, allow_pickle)


def drop(place: Place, key_prefix: str, allow_pickle: bool) -> None:
    """See `remove_sharded_tensors`."""
    stored = Stored.read(place)
    every = stored.flat_keys()
    kept = [key for key, name in every.items() if name is None or not name.startswith(key_prefix)]
    if len(kept) == len(every):
        log.warning("%s has nothing sharded whose key begins with %r: nothing was removed", stored.where, key_prefix)
        return
    request = Request()
    labels = {key: request.add(key) for key in kept}
    request.run(stored, no_dist=True, allow_pickle=allow_pickle)
    state = stored.inflated({key: request.values[label] for key, label in labels.items()})
    store, old = stored.store, stored.checkpoint
    files = {name: store.read_attachment(old, name) for name in store.attachments(old)}
    store.save(
        state, run=old.run, step=old.step, overwrite=True, metadata=old.metadata, ephemeral=old.ephemeral,
        attachments=files, allow_pickle=allow_pickle, no_dist=True,
    )  # fmt: skip
