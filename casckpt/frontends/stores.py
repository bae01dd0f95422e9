"""The kinds of value that every front end takes for a store."""

from __future__ import annotations

import os
from typing import TypeAlias

from casckpt.store.opening import open as open_store
from casckpt.store.store import Store

AnyStore: TypeAlias = Store | str | os.PathLike[str]
"""A store, a path or a URL."""


def as_store(store: AnyStore) -> Store:
    """The store itself, opened if it is named. Raises InvalidInput or Unsupported for a URL that cannot be used."""
    return store if isinstance(store, Store) else open_store(store)
