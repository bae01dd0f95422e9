"""Bodies of requests and answers: never a copy of all that is put, never more of an answer than is expected."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from casckpt.errors import Refused
from casckpt.storage.remote.patience import moved

MOST = 16 << 20  # bytes of an answer that is no object: ten times what a thousand long names take
_CHUNK = 1 << 20
_PIECE = 256 << 10  # bytes: what the socket does not take at once is copied, and no more than that


class AnswerBody(Protocol):
    """What arrives of an answer."""

    async def read(self, size: int, /) -> bytes:
        """Read some bytes, at most ``size``; none at the end."""


async def read_whole(body: AnswerBody, limit: int, whose: str) -> bytes:
    """Read all of it; Refused, naming ``whose`` it is, if that is more than ``limit`` bytes."""
    data = bytearray()
    while chunk := await body.read(_CHUNK):
        data += chunk
        moved(len(chunk))
        if len(data) > limit:
            raise Refused(f"{whose} is longer than {limit} bytes, more than is ever expected there")
    return bytes(data)


class PutBody:
    """Looks like a file to botocore, which reads it for checksums and signatures, and begins again where it redirects.

    aiohttp sends what is iterated. (A real file it would read in small pieces, and ``bytes`` it would copy whole.)
    The memory must not change until the put has its answer. Each piece that is taken is progress of the request.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def tell(self) -> int:
        """Tell where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek as in a file."""
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def read(self, size: int | None = None) -> memoryview:
        """Read at most so many bytes, by default all that are left; they are the caller's memory."""
        end = len(self) if size is None or size < 0 else self._at + size
        piece = self._data[self._at : end]
        self._at += len(piece)
        moved(len(piece))
        return piece

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        """Yield all of it, whatever was read: aiohttp may repeat a request that found its connection closed."""
        for start in range(0, len(self), _PIECE):
            yield (piece := self._data[start : start + _PIECE])
            moved(len(piece))
