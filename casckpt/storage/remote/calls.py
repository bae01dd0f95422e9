"""Calls to fsspec file systems, with limits on the time and on the response size."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol
from urllib.parse import urljoin

from typing_extensions import override

from casckpt.base.parallel import Late, within
from casckpt.errors import Refused
from casckpt.storage.remote.patience import Loop, Patience, begin_request, moved

WEB: Final = frozenset({"http", "https"})
_ON_AIOHTTP: Final = WEB | {"gs", "gcs"}  # Azure's client has its own timeouts
_CONNECT, _LATER = 10.0, 5.0  # seconds; the client times out later than casckpt, whose message has advice
_PAGE: Final = 64 << 20  # bytes in a page that lists a folder
_DEEPEST = 16  # levels of nested folders
_CHUNK = 1 << 20
_LINK: Final = re.compile(r"""href\s{0,9}=\s{0,9}["']?([^"'<>\s]{1,4096})""", re.IGNORECASE)


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


def calls_of(fs: Any, scheme: str, patience: Patience) -> Calls:
    """Return the calls for a file system whose URLs have this scheme."""
    return WebCalls(fs, patience) if scheme in WEB else Calls(fs, patience)


def with_timeouts(scheme: str, options: Mapping[str, Any], patience: Patience) -> Mapping[str, Any]:
    """Return a file system's options, adding timeouts if its client would wait longer than casckpt."""
    if scheme not in _ON_AIOHTTP:
        return options
    from aiohttp import ClientTimeout

    if scheme not in WEB:  # this client retries on its own, and the timeout applies to each of its requests
        timeout = ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=patience.request)
        return {"requests_timeout": timeout, **options}
    timeout = ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=patience.request + _LATER)
    return {**options, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}


class Calls:
    """Calls to a file system that retries on its own, so a request may take as long as a call."""

    def __init__(self, fs: Any, patience: Patience) -> None:
        self.fs = fs
        self._patience = replace(patience, request=patience.call)
        self._loop = Loop(fs.loop, self._patience) if fs.async_impl else None

    def __call__(self, method: str, *arguments: Any, nbytes: int = 0, **options: Any) -> Any:  # as in fsspec
        """Call a method. ``nbytes``: how many bytes it transfers, which extends the time limit.

        Raises TimeoutError.
        """
        if self._loop is not None:
            return self._loop.run(getattr(self.fs, f"_{method}")(*arguments, **options), nbytes)
        with begin_request(self._patience, nbytes) as request:
            try:
                return within(max(request.left, 0.0), lambda: getattr(self.fs, method)(*arguments, **options))
            except Late as error:
                raise TimeoutError(request.why) from error

    def read(self, path: str, size: int) -> bytes:
        """Read a whole file of this size."""
        data: bytes = self("cat_file", path, nbytes=size)
        return data

    def part(self, path: str, start: int, end: int) -> bytes:
        """Read a byte range of a file. Returns fewer bytes if the file ends earlier."""
        data: bytes = self("cat_file", path, start=start, end=end, nbytes=end - start)
        return data

    def fetch(self, path: str, target: Path, size: int) -> None:
        """Download a file of this size to ``target``."""
        self("get_file", path, str(target), nbytes=size)

    def find(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        """Find all files in a folder and its subfolders, each with its properties."""
        files = self("find", folder, detail=True)
        if files and not isinstance(files, dict):  # adlfs: an object with that name hides the objects below it
            raise Refused(f"{folder} is a file where a folder of the store belongs: move it out of the store")
        return files or {}


class WebCalls(Calls):
    """Calls to a web server. They use fsspec's session, but read the responses here, with a size limit."""

    def __init__(self, fs: Any, patience: Patience) -> None:
        super().__init__(fs, patience)
        self._web = self._loop = Loop(fs.loop, patience)  # this client does not retry

    @override
    def read(self, path: str, size: int) -> bytes:
        return self._web.run(self._whole(path, size))

    @override
    def part(self, path: str, start: int, end: int) -> bytes:
        return self._web.run(self._part(path, start, end)) if end > start else b""

    @override
    def fetch(self, path: str, target: Path, size: int) -> None:
        with target.open("wb") as file:
            self._web.run(self._fetch(path, file, size))

    def find(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        """See `Calls`. Follows the links on pages, starting at the folder's page. Sizes are unknown."""
        files: dict[str, Mapping[str, Any]] = {}
        pending = [f"{folder.rstrip('/')}/"]
        while pending:
            for link in self._links(pending.pop()):
                if not link.endswith("/"):
                    files[link] = {"name": link, "size": None, "type": "file"}
                elif link.count("/") <= folder.count("/") + _DEEPEST:
                    pending.append(link)
        return files

    def _links(self, page: str) -> set[str]:
        """Return the links to files and folders directly below a page."""
        try:
            html = self._web.run(self._page(page))
        except FileNotFoundError:
            return set()
        links = {urljoin(page, unescape(match[1])) for match in _LINK.finditer(html.decode(errors="replace"))}
        return {link for link in links if _is_below(page, link)}

    async def _page(self, url: str) -> bytes:
        async with self._answer(url) as answer:
            kind = answer.headers.get("Content-Type", "text/html").partition(";")[0]
            return await read_whole(answer.content, _PAGE, f"the page {url}") if kind == "text/html" else b""

    async def _whole(self, url: str, size: int) -> bytes:
        async with self._answer(url) as answer:
            return await read_whole(answer.content, size, url)

    async def _part(self, url: str, start: int, end: int) -> bytes:
        async with self._answer(url, Range=f"bytes={start}-{end - 1}") as answer:
            skip, data = (start if answer.status == 200 else 0), bytearray()  # some servers ignore the range
            while len(data) < end - start and (chunk := await answer.content.read(_CHUNK)):
                moved(len(chunk))
                data += chunk[skip:]
                skip = max(0, skip - len(chunk))
            return bytes(data[: end - start])

    async def _fetch(self, url: str, file: BinaryIO, size: int) -> None:
        async with self._answer(url) as answer:
            while chunk := await answer.content.read(_CHUNK):
                moved(len(chunk))
                if file.tell() + len(chunk) > size:
                    raise Refused(f"{url} is longer than the {size} bytes that the server reported; try again")
                file.write(chunk)

    @asynccontextmanager
    async def _answer(self, url: str, **headers: str) -> AsyncIterator[Any]:
        session = await self.fs.set_session()
        options = {**self.fs.kwargs, "headers": {**self.fs.kwargs.get("headers", {}), **headers}}
        async with session.get(self.fs.encode_url(url), **options) as answer:
            if answer.status in (404, 410):
                raise FileNotFoundError(url)
            answer.raise_for_status()
            yield answer


def _is_below(page: str, link: str) -> bool:
    name = link[len(page) :].removesuffix("/")
    return link.startswith(page) and name not in ("", ".", "..") and not set("/?#") & set(name)
