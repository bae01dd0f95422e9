"""Storage for the tests of repositories and checkpoints: in memory or in buckets (``--storage``).

These tests compare exact numbers of requests. Therefore, a bucket has the same traits here as memory: exclusive
creates are known to work, and reads never span a gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from casckpt.storage.base import Traits
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation

if TYPE_CHECKING:
    from tests.support.servers import Server

SERVERS: Final = ("moto", "seaweed")
_SUITES: Final = {
    "repository": ("commit_damage", "repository"),
    "history": ("commits", "tags", "transactions"),
    "contents": ("blobs", "checkpoint", "manifests", "refs"),
    "upkeep/gc": ("forgetting", "gc"),
    "upkeep/repair": ("affected", "blob_check", "repair", "verify"),
    "saving": ("frozen", "reuse", "save", "saver"),
    "loading": ("arguments", "entry_reader", "load", "load_plan", "read_bytes", "transfer"),
    "store": ("damage", "faults", "opening", "roundtrip"),
}
MODULES: Final = {f"tests/{folder}/test_{name}.py" for folder, names in _SUITES.items() for name in names}
"""The tests that create their stores with `tests.support.repositories.memory`."""

_STORES = itertools.count()
_places: list[tuple[str, Server]] = []


class Far(RemoteStore):
    """A store in a bucket."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, exclusive=True, read_gap=0)


class Near(RemoteStore):
    """A store in a bucket that does not report itself as remote, for tests of gc grace periods and polling
    intervals."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, exclusive=True, read_gap=0, remote=False)


def storage(*, near: bool) -> RemoteStore | None:
    """Return new storage of the kind that the session uses. None means memory."""
    if not _places:
        return None
    bucket, server = _places[-1]
    place = RemoteLocation("s3", f"{bucket}/store-{next(_STORES)}", server.options)
    return Near(place) if near else Far(place)


@contextmanager
def stores_in(server: Server) -> Iterator[None]:
    """Inside the block, `storage` returns storage in a bucket of ``server``."""
    _places.append((server.new_bucket(), server))
    try:
        yield
    finally:
        _places.pop()
