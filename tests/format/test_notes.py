"""A host's notes are decoded as they were encoded, and notes of a different version are ignored."""

from __future__ import annotations

import pytest

from casckpt.format import notes
from casckpt.format.names import TxId

TXID = TxId("20260101T000000.000000Z-0123456789abcdef-1")


def test_notes_decode_as_encoded() -> None:
    paused = notes.PausedGc("memory://a", {"objects/a": 3}, frozenset([TXID]), frozenset())
    assert notes.decode(notes.encode(paused), notes.PAUSED_GC) == paused
    assert notes.decode(notes.encode({TXID: (TXID, 1, 2, 3, 4)}), notes.FOLDERS) == {TXID: (TXID, 1, 2, 3, 4)}
    assert notes.decode(notes.encode({TXID: (2, 5)}), notes.SIGNS_OF_LIFE) == {TXID: (2, 5)}


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b'{"a": [1]}', b'{"a": ["b", 1]}', b"\xff"])
def test_notes_of_a_different_version_are_ignored(data: bytes | None) -> None:
    assert notes.decode(data, notes.FOLDERS) is None
    assert notes.decode(data, notes.SIGNS_OF_LIFE) is None
    assert notes.decode(data, notes.PAUSED_GC) is None
