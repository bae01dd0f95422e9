"""Notes: JSON values of known types that a host keeps in its catalogue for later runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.json import Decoder

from casckpt.format.names import TxId

T = TypeVar("T")

FolderRow: TypeAlias = tuple[TxId, int, int, int, int]
"""The guard of a folder, and the sums of what it guards."""
BlobShares: TypeAlias = dict[str, dict[str, int]]
"""For each blob (uploader/hash), the bytes of each branch of the state."""
SignsRow: TypeAlias = tuple[int, int]
"""Signs of life of a transaction, and when the last new one was seen."""


class PausedGc(msgspec.Struct, frozen=True):
    """A gc that ran out of time. ``candidates``: (kind, hash, bytes) of objects, by uploader."""

    url: str
    candidates: dict[TxId, list[tuple[str, str, int]]]
    ended: list[TxId]
    waits: list[TxId]


PAUSED_GC: Decoder[PausedGc] = Decoder(PausedGc)
FOLDERS: Decoder[dict[TxId, FolderRow]] = Decoder(dict[TxId, FolderRow])
BLOB_SHARES: Decoder[BlobShares] = Decoder(BlobShares)
BLOB_NAMES: Decoder[list[str]] = Decoder(list[str])
SIGNS_OF_LIFE: Decoder[dict[TxId, SignsRow]] = Decoder(dict[TxId, SignsRow])
"""Made while this module is imported: see `casckpt.format.records.DECODERS`."""


def encode(note: PausedGc | Mapping[TxId, Any] | BlobShares | Sequence[str]) -> bytes:
    """Encode a note."""
    return msgspec.json.encode(note)


def decode(data: bytes | None, kind: Decoder[T]) -> T | None:
    """Decode a note; None if there is none, or if another version wrote it."""
    try:
        return None if data is None else kind.decode(data)
    except msgspec.DecodeError:
        return None
