"""Stores for front ends, which accept a Store, a path or a URL."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from casckpt.errors import Mismatch, MissingKey, Unsigned
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from casckpt.store.types import FillArguments

AnyStore: TypeAlias = Store | str | os.PathLike[str]
"""A store, a path or a URL."""


def as_store(store: AnyStore, create: bool | None = None) -> Store:
    """Return the Store itself, or open the one at a path or URL.

    ``create``: as for `casckpt.open`; None leaves a Store as it is. Raises InvalidInput or Unsupported for an invalid
    URL.
    """
    opened = store if isinstance(store, Store) else open_store(store)
    opened.repository.allow_create(create)
    return opened


def as_trusting(url: str, like: Store | None) -> Store:
    """Open the store at ``url`` with the same required signatures as ``like``.

    Return ``like`` itself if that is its URL. Raises the errors of `as_store`.
    """
    if like is None or url == like.url:
        return as_store(like or url)
    opened = as_store(url)
    opened.repository.trusted = like.repository.trusted
    return opened


def check_foreign(store: Store | None, path: str | os.PathLike[str]) -> None:
    """Raise Unsigned for a file or folder outside a store if ``store`` requires signatures."""
    if store is not None and store.repository.trusted is not None:
        raise Unsigned(
            f"{os.fspath(path)} is not in a store, so it has no signature, and {store.url} was opened with "
            "require_signature. Import it and sign the imported checkpoint, or load it with a store that was opened "
            "without require_signature"
        )


@contextmanager
def advising(
    call: str, takes: Collection[str] = (), more: str = "casckpt.load_model_and_optim_state"
) -> Iterator[None]:
    """If an error of a load advises arguments that ``call`` does not have, name the function that has ``more``."""
    try:
        yield
    except (Mismatch, MissingKey) as error:
        lacks = [f"{name}=" for name in FillArguments.__annotations__ if name not in takes and f"{name}=" in str(error)]
        if not lacks:
            raise
        text = f"{error}. {call} does not take {' or '.join(lacks)}; load with {more}, which does"
        raise type(error)(text, **vars(error)) from error
