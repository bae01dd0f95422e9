"""The types of names and digests."""

from __future__ import annotations

from typing import NewType

TxId = NewType("TxId", str)
"""Identifies a transaction, and the uploader of its objects: ``<time>-<random>-<run hash>-<step>``.

See `make_txid`.
"""

ManifestId = NewType("ManifestId", str)
"""The BLAKE3 hash of a manifest's index, as 64 hex digits: a checkpoint's id."""

BlobHash = NewType("BlobHash", str)
"""A blob's name, 64 hex digits: the hash of its proof.

The proof contains the hashes of all other bytes in the file.
"""

CellDigest = NewType("CellDigest", bytes)
"""The 32-byte BLAKE3 hash of a cell's bytes."""
