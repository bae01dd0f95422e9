"""Types of names and digests."""

from __future__ import annotations

from typing import NewType

TxId = NewType("TxId", str)
"""One transaction, and the uploader of its objects: ``<time>-<random>-<run hash>-<step>``; see `make_txid`."""

ManifestId = NewType("ManifestId", str)
"""BLAKE3 of a manifest's index, 64 hex digits: the id of a checkpoint."""

BlobHash = NewType("BlobHash", str)
"""The name of a blob, 64 hex digits: the hash of its proof, which has the hashes of all other bytes of the file."""

CellDigest = NewType("CellDigest", bytes)
"""BLAKE3 of the bytes of one cell, 32 bytes."""
