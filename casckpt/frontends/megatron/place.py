"""Parses a checkpoint's location, ``STORE#RUN@STEP``, which Megatron code calls checkpoint_dir."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from casckpt.frontends.megatron.errors import CheckpointingException
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.store.opening import At, at
from casckpt.store.store import Store

CheckpointDir: TypeAlias = str | os.PathLike[str] | At
"""``STORE#RUN@STEP``, or a result of `casckpt.at`."""


@dataclass(frozen=True)
class StoreRef:
    """A store and a reference to a checkpoint in it. A save needs RUN@STEP."""

    store: Store
    ref: str

    def run_and_step(self) -> tuple[str, int]:
        """Return the run and step of the reference. Raises CheckpointingException (an InvalidInput) if it has none."""
        run, separator, step = self.ref.rpartition("@")
        if not separator or not step.isascii() or not step.isdigit():
            raise CheckpointingException(
                f"{self.ref!r} is not a location to save to: pass STORE#RUN@STEP, such as ckpts#sft@100"
            )
        place = at(self.store, run=run, step=int(step))
        return place.run, place.step


@lru_cache(maxsize=16)
def _opened(url: str) -> Store:
    """Return the same `Store` for the same URL, so that it keeps its caches and serializes its background saves."""
    return as_store(url)


def place_of(checkpoint_dir: CheckpointDir) -> StoreRef:
    """Parse a checkpoint_dir.

    Raises CheckpointingException for any other value, and InvalidInput for an invalid URL.
    """
    if isinstance(checkpoint_dir, At):
        return StoreRef(_store(checkpoint_dir.store), f"{checkpoint_dir.run}@{checkpoint_dir.step}")
    text = _text(checkpoint_dir)
    store, separator, ref = text.rpartition("#")
    if not separator or not store or not ref:
        raise CheckpointingException(
            f"{text!r} is not a location in a store: pass STORE#RUN@STEP, such as ckpts#sft@100, or "
            "casckpt.at(store, run=, step=)"
        )
    return StoreRef(_store(store), ref)


def _text(checkpoint_dir: str | os.PathLike[str]) -> str:
    if not isinstance(checkpoint_dir, str | os.PathLike):
        raise CheckpointingException(
            f"a checkpoint_dir cannot be a {type(checkpoint_dir).__name__}: pass STORE#RUN@STEP, such as "
            "ckpts#sft@100, or "
            "casckpt.at(store, run=, step=)"
        )
    return os.fspath(checkpoint_dir)


def _store(store: AnyStore) -> Store:
    if isinstance(store, Store):
        return store
    text = os.fspath(store)
    return _opened(text if "://" in text else os.path.abspath(text))


def folder_of(checkpoint_dir: CheckpointDir) -> Path | None:
    """Return the folder if the checkpoint_dir is a path, as in Megatron itself; None for a store."""
    return None if isinstance(checkpoint_dir, At) or "#" in _text(checkpoint_dir) else Path(checkpoint_dir)
