"""`casckpt.open` opens a store by its path or URL. `casckpt.at` names the location of a checkpoint in a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from casckpt.base.names import check_run, check_step
from casckpt.base.text import check_outside
from casckpt.base.units import parse_size
from casckpt.errors import InvalidInput
from casckpt.repository.blob_cache import BlobCache, in_memory
from casckpt.repository.repository import ShareReads, default_cache_folder, open_repository
from casckpt.repository.signing_keys import KeyFile, KeyFiles, private_key, public_keys
from casckpt.storage import open_storage
from casckpt.storage.throttle import ThrottledStore, Turn
from casckpt.store.store import Store, repository_of


def open(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
    share_reads: ShareReads = "auto",
    cache_saves: bool = False,
    staging_bytes: int | str | None = None,
    mirror: Store | str | os.PathLike[str] | None = None,
    single_writer: bool = False,
    page_cache: bool | None = None,
    sign_with: KeyFile | None = None,
    require_signature: KeyFiles | None = None,
    create: bool | None = None,
) -> Store:
    """Open a store at a path, ``s3://bucket/prefix``, ``memory://`` or any other URL that fsspec supports.

    The first save creates the store.

    ``storage_options``: options for the storage's client (fsspec). ``cache_dir``: the folder for this host's catalogue
    of the store (default: the user's cache folder). If you pass it and the store is remote, the folder also caches each
    blob of which a load reads more than half, up to ``cache_bytes`` in total ("200GiB"; default: half of the free space
    on that disk; 0 disables the cache). See `Store.pre_download`. ``share_reads``: whether the ranks of a host that
    load the same bytes read them from the store once, and share them in the host's memory (/dev/shm), and whether hosts
    pass on to each other what several of them need. "auto" does so if the store is remote, and "on" also if it is a
    folder, such as one on a network file system. ``cache_saves``: whether
    saves also put their blobs into the cache, so that a restart on the same host finds them there. Without
    ``cache_dir``, they are kept in the host's memory. ``staging_bytes``: the memory that the copies of background saves
    of all ranks may take on this host ("64GiB"; default: 80 % of what is free when the copies are made). If the copy of
    one rank does not fit, all ranks save in the foreground. ``mirror``: a second store to which casckpt copies commits
    in the background. See `Store.wait_for_mirror`. ``single_writer``: your promise that no other job
    writes to the store at the same time. This allows storage that cannot create keys exclusively, such as a folder on a
    mount without hard links. ``page_cache``: for a store in a folder, True leaves saved and loaded bytes in the page
    cache for the next load, and False does not. By default, a load leaves them there if that costs nothing, which means
    that there is enough memory and the file system fills its cache in large pieces. ``sign_with``: a file with a
    private key (Ed25519, without a password) that signs each save before its commit; `Store.sign` signs checkpoints
    later. ``require_signature``: one or more public keys. Loads, exports and the server refuse a checkpoint that is not
    signed with any of these keys, and raise Unsigned. ``create``: False requires a store that exists, so a save or
    `resume` raises NotFound instead of starting a new one. None does the same if this host knows that a store was here,
    on a mount that is missing now. True always allows a new store. The environment variable CASCKPT_CREATE (0 or 1)
    sets it for a whole job.

    Raises InvalidInput or Unsupported for an invalid or unsupported URL, and NotFound for a missing key file.
    """
    if share_reads not in get_args(ShareReads):
        raise InvalidInput(f'share_reads={share_reads!r:.40} is not valid: pass "auto", "on" or "off"')
    staging = parse_size(staging_bytes) if isinstance(staging_bytes, str) else staging_bytes
    if staging is not None and (type(staging) is not int or staging < 0):
        raise InvalidInput(f"staging_bytes={staging!r:.40} is not valid: pass a size, or 0 to save without copies")
    storage = open_storage(url, storage_options, single_writer=single_writer, page_cache=page_cache)
    here = replace(
        open_repository(storage, cache_dir, create),
        single_writer=single_writer,
        cache_bytes=parse_size(cache_bytes) if isinstance(cache_bytes, str) else cache_bytes,
        share_reads=share_reads,
        cache_saves=cache_saves,
        staging_bytes=staging,
        signer=None if sign_with is None else private_key(sign_with).private_bytes_raw(),
        trusted=None if require_signature is None else public_keys(require_signature),
    )
    if mirror is None:
        return Store(here)
    there = repository_of(mirror, None if cache_dir is None else Path(cache_dir))
    check_outside(here.storage.url, there.storage.url)
    store = Store(here, there)
    for wake in here.listeners:  # continue copying where an earlier process stopped
        wake()
    return store


def host_caches(folder: Path | None) -> list[BlobCache]:
    """Return the blob caches of this host: the one in ``folder`` (None: the default), and the one in memory."""
    return [BlobCache(folder or default_cache_folder()), in_memory()]


def throttled(store: Store, count: int | None, folder: str | os.PathLike[str] | None) -> Store:
    """Limit how many ranks of a node upload to ``store`` at the same time to ``count``. None means no limit.

    ``folder``: the folder for the lock files (default: the folder for temporary files).
    """
    if count is None:
        return store
    turn = Turn(count, None if folder is None else Path(folder))
    # mypy cannot see that __getattr__ provides the protocol
    storage: Any = ThrottledStore(store.repository.storage, turn)
    repository = replace(store.repository, storage=storage)
    repository.listeners = store.repository.listeners  # the mirror must also see these saves
    return Store(repository)


@dataclass(frozen=True, slots=True)
class At:
    """The location of a checkpoint, for front ends that expect a folder. Its string form is ``STORE#RUN@STEP``."""

    store: Store | str | os.PathLike[str]
    run: str
    step: int

    def __str__(self) -> str:
        url = self.store.url if isinstance(self.store, Store) else os.fspath(self.store)
        return f"{url}#{self.run}@{self.step}"


def at(store: Store | str | os.PathLike[str], *, run: str, step: int) -> At:
    """Return the location of a checkpoint. Raises InvalidInput for an invalid run or step."""
    return At(store, check_run(run), check_step(step))
