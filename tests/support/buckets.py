"""Stores in a bucket behind a proxy, and states to save in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from casckpt.repository.repository import Repository
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.store.store import Store
from tests.support.proxy import Proxy
from tests.support.saves import CELL, cells
from tests.support.servers import Server


def state(step: int) -> dict[str, Any]:
    """Return a state of several blobs, some of which are identical to those of the previous step."""
    return {"kept": cells(40, seed=1), "new": cells(40, seed=step)}


def impatient(server: Server, proxy: Proxy, bucket: str, cache: Path, backoff: Backoff) -> Store:
    """Open a store behind the proxy, with short timeouts."""
    options: Mapping[str, Any] = {**server.options, "endpoint_url": proxy.endpoint}
    store = Store(Repository(RemoteStore(RemoteLocation("s3", f"{bucket}/store", options), backoff=backoff), cache))
    store.create(cell_bytes=CELL, blob_bytes=64 << 10)
    return store
