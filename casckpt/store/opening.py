"""`casckpt.open`: from a path or URL to a `Store`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from casckpt.errors import InvalidInput
from casckpt.repository.opening import open_repository
from casckpt.repository.signing_keys import KeyFile, KeyFiles
from casckpt.store.store import Store, repository_of


def open(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
    mirror: Store | str | os.PathLike[str] | None = None,
    single_writer: bool = False,
    page_cache: bool | None = None,
    sign_with: KeyFile | None = None,
    require_signature: KeyFiles | None = None,
) -> Store:
    """Open a store: a path, ``s3://bucket/prefix``, ``memory://`` or another URL that fsspec knows.

    It creates nothing; the first save does. ``http://`` and ``https://`` can only be read.

    ``storage_options``: passed on to the storage's client (fsspec's). ``cache_dir``: the folder where this host keeps
    what it knows of the store (default: the user's cache folder). If it is given, and the store is remote, loads also
    keep there the files of which they read the greater part, at most ``cache_bytes`` of them ("200GiB"; default: half
    of what is free on that disk; 0 for none); see `Store.pre_download`. ``mirror``: another store; what is committed
    here is copied there in the background; see `Store.wait_for_mirror`. ``single_writer``: your promise that nobody
    else writes to the store at the same time. It makes storages usable that cannot create exclusively. ``page_cache``,
    of a store in a folder: True leaves what is saved and loaded in the host's memory for the next load, False leaves
    nothing there. By default a load does where that costs nothing: memory is plenty, and the file system fills its
    cache in large pieces. ``sign_with``: a file with a private key (Ed25519, without a password), which signs each save
    before its commit, as `Store.sign` does later. ``require_signature``: a public key, or several. What none of them
    has signed is not loaded, exported or served, and raises Unsigned.

    Raises InvalidInput or Unsupported for a URL that cannot be used, NotFound for a key that is not there.
    """
    here = open_repository(
        url, storage_options=storage_options, cache_dir=cache_dir, cache_bytes=cache_bytes,
        single_writer=single_writer, page_cache=page_cache, sign_with=sign_with,
        require_signature=require_signature,
    )  # fmt: skip
    if mirror is None:
        return Store(here)
    there = repository_of(mirror, None if cache_dir is None else Path(cache_dir))
    if there.storage.url == here.storage.url:
        raise InvalidInput(f"{there.storage.url} is to be its own mirror: give another store")
    store = Store(here, there)
    for wake in here.listeners:  # copies that an earlier process left go on
        wake()
    return store
