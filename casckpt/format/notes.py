"""Notes: JSON values of known types that a host keeps in its catalogue for later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.json import Decoder

from casckpt.format.names import TxId

T = TypeVar("T")

FolderRow: TypeAlias = tuple[TxId, int, int, int, int]
"""A folder's guard, and the totals of what it guards."""
SignsRow: TypeAlias = tuple[int, int]
"""The number of a transaction's signs of life, and the time when the latest one was first seen."""
Names: TypeAlias = tuple[int, list[TxId]]
"""The number of an announcement of a run, and transactions, among them all that were announced up to this number."""


class PausedGc(msgspec.Struct, frozen=True):
    """A gc that timed out. ``candidates``: the sizes of objects, by key. ``waits``: the open transactions."""

    url: str
    candidates: dict[str, int]
    ended: frozenset[TxId]
    waits: frozenset[TxId]


PAUSED_GC: Decoder[PausedGc] = Decoder(PausedGc)
FOLDERS: Decoder[dict[TxId, FolderRow]] = Decoder(dict[TxId, FolderRow])
SIGNS_OF_LIFE: Decoder[dict[TxId, SignsRow]] = Decoder(dict[TxId, SignsRow])
FIRST_SEEN: Decoder[dict[str, int]] = Decoder(dict[str, int])
NAMES: Decoder[Names] = Decoder(Names)
NUMBER: Decoder[int] = Decoder(int)
"""Created at import: see `casckpt.format.records.DECODERS`."""


def encode(note: PausedGc | Mapping[TxId, Any] | Mapping[str, int] | Names | int) -> bytes:
    """Encode a note."""
    return msgspec.json.encode(note)


def decode(data: bytes | None, kind: Decoder[T]) -> T | None:
    """Decode a note. Return None if there is no note, or if a different version of casckpt wrote it."""
    try:
        return None if data is None else kind.decode(data)
    except msgspec.DecodeError:
        return None
