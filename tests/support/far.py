"""A storage in memory that reports itself as remote, and counts requests."""

from __future__ import annotations

from dataclasses import replace

from casckpt.storage.base import Traits
from tests.support.faulty import FaultyStore
from tests.support.repositories import memory


class FarStore(FaultyStore):
    """As a bucket looks from above; with faults, if they are injected."""

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, remote=True, parallel=4)

    def reads_of_blobs(self) -> int:
        """Ranged reads."""
        return self.count("read_into", "*.safetensors")


def far() -> FarStore:
    """One of its own."""
    return FarStore(memory())
