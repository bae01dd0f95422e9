"""Where the suites of repositories and checkpoints keep their stores: in memory, or each in a bucket (``--storage``).

The suites say exactly what is stored, read and asked, so a bucket is told to promise what memory promises: that it
creates exclusively is known, and no gap is worth reading.
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
    "base": ("keywords", "notebook"),
    "repository": ("commit_damage", "repository"),
    "history": ("commits", "tags", "transactions"),
    "contents": ("blobs", "checkpoint", "manifests", "refs"),
    "upkeep/gc": ("forgetting", "gc"),
    "upkeep/repair": ("affected", "blob_check", "blob_rebuild", "cell_sources", "relocation", "repair", "verify"),
    "saving": ("frozen", "reuse", "save", "saver"),
    "loading": ("arguments", "entry_reader", "load", "load_plan", "read_bytes", "transfer"),
    "store": ("damage", "faults", "opening", "roundtrip"),
}
MODULES: Final = {f"tests/{folder}/test_{name}.py" for folder, names in _SUITES.items() for name in names}
"""The suites that make their stores by `tests.support.repositories.memory`."""

_STORES = itertools.count()
_places: list[tuple[str, Server]] = []


class Far(RemoteStore):
    """A store in a bucket."""

    @property
    def traits(self) -> Traits:
        """As said above."""
        return replace(super().traits, exclusive=True, read_gap=0)


class Near(RemoteStore):
    """The same, for tests of what depends on the place: ages of gc, how often something is looked at."""

    @property
    def traits(self) -> Traits:
        """As those of memory."""
        return replace(super().traits, exclusive=True, read_gap=0, remote=False)


def storage(*, near: bool) -> RemoteStore | None:
    """A new storage where the session was asked to have them; None: in memory."""
    if not _places:
        return None
    bucket, server = _places[-1]
    place = RemoteLocation("s3", f"{bucket}/store-{next(_STORES)}", server.options)
    return Near(place) if near else Far(place)


@contextmanager
def stores_in(server: Server) -> Iterator[None]:
    """Until the end, `storage` gives storages in a bucket of ``server``."""
    _places.append((server.new_bucket(), server))
    try:
        yield
    finally:
        _places.pop()
