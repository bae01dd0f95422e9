"""The kinds of value that every front end takes for a store."""

from __future__ import annotations

import os
from typing import TypeAlias

from casckpt.errors import Unsigned
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store

AnyStore: TypeAlias = Store | str | os.PathLike[str]
"""A store, a path or a URL."""


def as_store(store: AnyStore) -> Store:
    """The store itself, opened if it is named. Raises InvalidInput or Unsupported for a URL that cannot be used."""
    return store if isinstance(store, Store) else open_store(store)


def as_trusting(url: str, like: Store | None) -> Store:
    """``like``, if that is its URL; else the store there, opened to demand the signatures that ``like`` demands.

    Raises as `as_store`.
    """
    if like is None or url == like.url:
        return as_store(like or url)
    opened = as_store(url)
    opened.repository.trusted = like.repository.trusted
    return opened


def check_foreign(store: Store | None, path: str | os.PathLike[str]) -> None:
    """Raise Unsigned for a file or folder that is in no store, where ``store`` demands signatures."""
    if store is not None and store.repository.trusted is not None:
        raise Unsigned(
            f"{os.fspath(path)} is in no store, so nobody has signed it, and {store.url} was opened with "
            "require_signature. Import it, and sign that; or load it with a store that was opened without"
        )
