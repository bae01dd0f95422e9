"""In-memory storage that reports itself as remote and counts requests."""

from __future__ import annotations

from dataclasses import replace

from casckpt.storage.base import Traits
from tests.support.faulty import FaultyStore
from tests.support.repositories import memory


class FarStore(FaultyStore):
    """Behaves like a bucket, with the faults that a test injects."""

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, remote=True, parallel=4)

    def reads_of_blobs(self) -> int:
        """Return the number of ranged reads of blobs."""
        return self.count("read_into", "*.safetensors")


def far() -> FarStore:
    return FarStore(memory())
