"""Opens a store from a path or URL, without support for tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from casckpt.base.units import parse_size
from casckpt.repository.repository import Repository
from casckpt.repository.signing_keys import KeyFile, KeyFiles, private_key, public_keys
from casckpt.storage import open_storage

CACHE_VARIABLE = "CASCKPT_CACHE_DIR"


def open_repository(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
    single_writer: bool = False,
    page_cache: bool | None = None,
    sign_with: KeyFile | None = None,
    require_signature: KeyFiles | None = None,
) -> Repository:
    """Open a store with the arguments of `casckpt.open`, without creating or reading anything.

    If ``cache_dir`` is None, the environment variable that `CACHE_VARIABLE` names sets the cache folder, both for
    programs and for the command line.

    Raises `InvalidInput` or `Unsupported` for an invalid URL or key, and `NotFound` for a missing key file.
    """
    storage = open_storage(url, storage_options, single_writer=single_writer, page_cache=page_cache)
    folder = cache_dir if cache_dir is not None else os.environ.get(CACHE_VARIABLE) or None
    return Repository(
        storage,
        None if folder is None else Path(folder).expanduser().absolute(),
        single_writer=single_writer,
        cache_bytes=parse_size(cache_bytes) if isinstance(cache_bytes, str) else cache_bytes,
        signer=None if sign_with is None else private_key(sign_with).private_bytes_raw(),
        trusted=None if require_signature is None else public_keys(require_signature),
    )
