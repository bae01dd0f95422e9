"""The body of a put: what the client reads is the caller's memory, piece by piece, and never a copy of all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from casckpt.storage.remote.patience import moved

_PIECE = 256 << 10  # bytes: what the socket does not take at once is copied, and no more than that


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
