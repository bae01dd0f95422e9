"""`casckpt.open` opens a store by its path or URL. `casckpt.at` names the place of a checkpoint in a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from casckpt.base.names import check_run, check_step
from casckpt.errors import InvalidInput
from casckpt.repository.opening import open_repository
from casckpt.repository.signing_keys import KeyFile, KeyFiles
from casckpt.storage.throttle import ThrottledStore, Turn
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

    The first save creates the store. ``http://`` and ``https://`` stores are read-only.

    ``storage_options``: for the client of the storage (fsspec). ``cache_dir``: the folder for the catalogue of the
    store on this host (default: the user's cache folder). If you give it and the store is remote, loads also cache
    there the blobs that they read by more than half, up to ``cache_bytes`` ("200GiB"; default: half of the free space
    of that disk; 0 for none). See `Store.pre_download`. ``mirror``: another store. casckpt copies commits there in the
    background. See `Store.wait_for_mirror`. ``single_writer``: your promise that no other process writes to the store
    at the same time. It allows storages without exclusive creates. ``page_cache``, for a store in a folder: True leaves
    saved and loaded bytes in the page cache for the next load, False leaves none. By default a load leaves them if this
    costs nothing: there is enough memory, and the file system fills its cache in large pieces. ``sign_with``: a file
    with a private key (Ed25519, without a password), which signs each save before its commit, as `Store.sign` does
    later. ``require_signature``: one or more public keys. Loads, exports and the server refuse a checkpoint without a
    signature by one of them, and raise Unsigned.

    Raises InvalidInput or Unsupported for a URL that cannot be used, NotFound for a missing key file.
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
        raise InvalidInput(f"{there.storage.url} cannot be its own mirror: give another store")
    store = Store(here, there)
    for wake in here.listeners:  # continue the copies of an earlier process
        wake()
    return store


def throttled(store: Store, count: int | None, folder: str | os.PathLike[str] | None) -> Store:
    """Return ``store`` with a limit of ``count`` ranks of a node that upload at the same time. None: no limit.

    ``folder``: for the lock files; default: in the folder for temporary files.
    """
    if count is None:
        return store
    turn = Turn(count, None if folder is None else Path(folder))
    storage: Any = ThrottledStore(
        store.repository.storage, turn
    )  # mypy cannot see that __getattr__ provides the protocol
    repository = replace(store.repository, storage=storage)
    repository.listeners = store.repository.listeners  # the mirror sees these saves too
    return Store(repository)


@dataclass(frozen=True, slots=True)
class At:
    """The place of a checkpoint, for front ends that expect a folder. As text: ``STORE#RUN@STEP``."""

    store: Store | str | os.PathLike[str]
    run: str
    step: int

    def __str__(self) -> str:
        url = self.store.url if isinstance(self.store, Store) else os.fspath(self.store)
        return f"{url}#{self.run}@{self.step}"


def at(store: Store | str | os.PathLike[str], *, run: str, step: int) -> At:
    """Return the place of a checkpoint. Raises InvalidInput for an unusable run or step."""
    return At(store, check_run(run), check_step(step))
