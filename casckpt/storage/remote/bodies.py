"""Answers of servers that are read whole: never more of them than is expected."""

from __future__ import annotations

from typing import Protocol

from casckpt.errors import Refused
from casckpt.storage.remote.patience import moved

MOST = 16 << 20  # bytes of an answer that is no object: ten times what a thousand long names take
_CHUNK = 1 << 20


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
