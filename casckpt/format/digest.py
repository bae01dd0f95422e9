"""BLAKE3, the only hash function of the format."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from casckpt.base.digest import Buffer
from casckpt.format.names import BlobHash, CellDigest

PROOF_CONTEXT = "casckpt 2026-11-23 the proof of a blob"
"""The context for derive-key mode, which gives a proof a different hash than a cell with the same bytes."""


def cell_digest(data: Buffer) -> CellDigest:
    """Compute the 32-byte digest of a cell. Releases the GIL for all but tiny cells."""
    return CellDigest(blake3(data).digest())


def cell_digests(data: memoryview, spans: Iterable[tuple[int, int]]) -> bytes:
    """Compute the digests of several cells, one after the other. ``spans``: the range of each cell in ``data``."""
    hasher, digests = blake3(), []
    reset, update, digest = hasher.reset, hasher.update, hasher.digest  # reused, which is faster for small cells
    for lo, hi in spans:
        reset()
        update(data[lo:hi])
        digests.append(digest())
    return b"".join(digests)


def proof_name(proof: Buffer) -> BlobHash:
    """Compute the name of the blob that has this proof: 64 hex digits, as ``b3sum --derive-key`` prints them."""
    return BlobHash(blake3(proof, derive_key_context=PROOF_CONTEXT).hexdigest())


Hasher = blake3
"""Computes a digest from pieces, with ``update``. It is fast for pieces of 256 KiB or more."""
