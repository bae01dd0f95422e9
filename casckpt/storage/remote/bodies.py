"""Request and response bodies: a put copies its data in pieces, and a response has a size limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from casckpt.errors import Refused
from casckpt.storage.remote.patience import moved

MOST = 16 << 20  # bytes in a response other than an object: ten times the size of a listing of a thousand long names
_CHUNK = 1 << 20
_PIECE = 256 << 10  # bytes: the most that is copied if the socket does not accept everything immediately


class AnswerBody(Protocol):
    """The body of a response."""

    async def read(self, size: int, /) -> bytes:
        """Read at most ``size`` bytes. Returns b"" at the end."""


async def read_whole(body: AnswerBody, limit: int, whose: str) -> bytes:
    """Read the whole body.

    Raises Refused if it exceeds ``limit`` bytes; ``whose`` describes the body in the message.
    """
    data = bytearray()
    while chunk := await body.read(_CHUNK):
        data += chunk
        moved(len(chunk))
        if len(data) > limit:
            raise Refused(f"{whose} is longer than {limit} bytes, which is more than casckpt ever expects there")
    return bytes(data)


class PutBody:
    """The body of a put. botocore reads it like a file, for checksums, signatures and redirects; aiohttp iterates it.

    (aiohttp would read a real file in small pieces, and would copy ``bytes`` in one piece.) The memory must not change
    before the put receives its response. Each piece counts as progress of the request.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the offset of the next read, as for a file."""
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def read(self, size: int | None = None) -> memoryview:
        """Return a view of at most ``size`` bytes, or of all remaining bytes by default."""
        end = len(self) if size is None or size < 0 else self._at + size
        piece = self._data[self._at : end]
        self._at += len(piece)
        moved(len(piece))
        return piece

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        """Yield all bytes from the start, because aiohttp may repeat a request whose connection was closed."""
        for start in range(0, len(self), _PIECE):
            yield (piece := self._data[start : start + _PIECE])
            moved(len(piece))
