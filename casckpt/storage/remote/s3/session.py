"""A session of the S3 client that bounds answers other than objects: listings and errors, which might never end."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiobotocore.httpsession import AIOHTTPSession

from casckpt.storage.remote.bodies import MOST, read_whole


class _Whole(NamedTuple):
    """An answer that has arrived."""

    data: bytes

    async def read(self) -> bytes:
        """Read all of it."""
        return self.data


class Session(AIOHTTPSession):  # type: ignore[misc]  # it has no types
    """The client's own way to send; its answers are of `MOST` bytes at the most, unless they are objects."""

    async def send(self, request: Any) -> Any:
        """See `AIOHTTPSession`, which would read what does not stream whole."""
        streams, request.stream_output = request.stream_output, True
        try:
            answer = await super().send(request)
        finally:
            request.stream_output = streams
        if not streams or answer.status_code >= 300:
            answer.raw = _Whole(await _read(answer.raw, request.url))
        return answer


async def _read(raw: Any, url: str) -> bytes:
    try:
        return await read_whole(raw.content, MOST, f"the answer of {url.partition('?')[0]}, which should be short,")
    except BaseException:
        raw.close()
        raise
