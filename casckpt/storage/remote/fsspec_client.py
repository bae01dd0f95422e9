"""The client for all storage that fsspec supports. It uses fsspec's methods."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fsspec.core import url_to_fs

from casckpt.base.text import in_one_line
from casckpt.errors import NotFound, Refused, Unsupported
from casckpt.storage.base import AlreadyExists, Finding, ListedObject, ShortObject
from casckpt.storage.failures import ROOM, is_full
from casckpt.storage.remote.calls import Calls, with_timeouts
from casckpt.storage.remote.client import ExplainedFailure, Page, microseconds_of
from casckpt.storage.remote.patience import Patience

_LONGEST = 300  # characters in an error message, because some contain whole responses
_TRANSIENT: Final = frozenset({408, 409, 425, 429})
_MISSING = "there is no such bucket or container: create it first, or correct the URL"
_DENIED = "check the credentials in storage_options and their permissions"
# Schemes whose pipe_file(mode="create") is one conditional request, and whose clients retry. They are probed.
# fsspec's default checks first and then writes, so two writers can both succeed.
_ATOMIC: Final = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")  # matches every key of a store


class FsspecClient:
    """`casckpt.storage.remote.client.Client` for the folder ``url``."""

    failures: tuple[type[Exception], ...] = (Exception,)  # each implementation has its own errors

    def __init__(self, url: str, options: Mapping[str, Any], patience: Patience = Patience()) -> None:  # noqa: B008 - frozen
        self.patience = patience
        self._scheme = url.partition("://")[0]
        self._fs, root = url_to_fs(url, **with_timeouts(self._scheme, options, patience))
        self._ask = Calls(self._fs, patience)
        self._root = root.rstrip("/")
        self._listing = threading.Lock()
        self.exclusive: bool | None = None if self._scheme in _ATOMIC else False

    def explain(self, error: Exception) -> ExplainedFailure:
        """See `casckpt.storage.remote.client.Client`."""
        line, status = in_one_line(error)[:_LONGEST], _status(error)
        if isinstance(error, FileNotFoundError) or status == 404:  # a missing object has already been handled
            return ExplainedFailure(f"{line}; {_MISSING}", kind=NotFound)
        if is_full(error, status, line):
            return ExplainedFailure(f"{line}; {ROOM}", full=True)
        if isinstance(error, PermissionError) or status in (401, 403):
            return ExplainedFailure(f"{line}; {_DENIED}")
        if isinstance(error, NotImplementedError | ImportError | TypeError):
            return ExplainedFailure(f"{line}; this kind of storage does not support that", kind=Unsupported)
        # the clients for `_ATOMIC` have already retried, with long pauses
        again = self._scheme not in _ATOMIC and (not 400 <= status < 500 or status in _TRANSIENT)
        return ExplainedFailure(f"{line}; check the network and the storage_options, and try again", again=again)

    def renew(self, error: Exception, began: float) -> bool:
        """See `casckpt.storage.remote.client.Client`. These clients renew credentials on their own."""
        return False

    def create(self, key: str, data: memoryview, put_id: str) -> None:
        """See `casckpt.storage.remote.client.Client`."""
        self._write(key, data, mode="create")

    def put(self, key: str, data: memoryview, put_id: str) -> None:
        """See `casckpt.storage.remote.client.Client`."""
        self._write(key, data, mode="overwrite")

    def put_id(self, key: str) -> str | None:
        """See `casckpt.storage.remote.client.Client`."""
        return None

    def _write(self, key: str, data: memoryview, mode: str) -> None:
        path = self._path(key)
        if self._scheme not in _ATOMIC:  # `_ATOMIC` storage has no folders
            self._ask("makedirs", path.rpartition("/")[0], exist_ok=True)
        try:
            self._ask("pipe_file", path, bytes(data), mode=mode, nbytes=data.nbytes)
        except FileExistsError as error:
            raise AlreadyExists(key) from error

    def get(self, key: str, limit: int) -> bytes:
        """See `casckpt.storage.remote.client.Client`."""
        size = self.size(key)
        if size is None:
            raise NotFound(f"object {key} is not in {self._root}: it was deleted or never written", key=key)
        if size > limit:
            raise Refused(f"object {key} in {self._root} has {size} bytes, but at most {limit} are allowed")
        return self._ask.read(self._path(key), size)

    def open(self, key: str) -> FsspecObject:
        """See `casckpt.storage.remote.client.Client`."""
        return FsspecObject(self, key)

    def size(self, key: str) -> int | None:
        """See `casckpt.storage.remote.client.Client`."""
        self._fs.invalidate_cache()
        try:
            info = self._ask("info", self._path(key))
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(why := error.__cause__, Exception) and not _is_absence(why):
                raise why from None  # fsspec reports some failures of servers as missing files
            return None
        if info["type"] != "file":
            return None
        return int(info["size"])

    def read(self, key: str, offset: int, end: int) -> bytes:
        """Read a byte range of an object. Raises FileNotFoundError."""
        return self._ask.part(self._path(key), offset, end)

    def page(self, prefix: str, after: str | None, *, deep: bool) -> Page:
        """See `casckpt.storage.remote.client.Client`. Every listing is a single page."""
        return Page(self._all(prefix), []) if deep else self._right_in(prefix.removesuffix("/"))

    def _all(self, prefix: str) -> list[ListedObject]:
        folder = prefix.rpartition("/")[0]
        with self._listing:  # all listings of the file system share one cache
            self._fs.invalidate_cache()
            path = self._path(folder) if folder else self._root
            files = self._ask.find(path)
        entries = [self._entry(path, about) for path, about in files.items()]
        return [entry for entry in entries if entry is not None and entry.key.startswith(prefix)]

    def _right_in(self, folder: str) -> Page:
        with self._listing:
            self._fs.invalidate_cache()
            try:
                items = self._ask("ls", self._path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return Page([], [])
        below = {item["name"].rstrip("/"): item for item in items if item["name"].startswith(f"{self._path(folder)}/")}
        files = [self._entry(name, item) for name, item in below.items() if item["type"] == "file"]
        names = [name.removeprefix(f"{self._root}/") for name, item in below.items() if item["type"] == "directory"]
        return Page([entry for entry in files if entry is not None], names)

    def _entry(self, path: str, about: Mapping[str, Any]) -> ListedObject | None:
        key = path.removeprefix(self._root).removeprefix("/")
        if about.get("type") == "directory" or not _KEY.fullmatch(key):
            return None
        time = microseconds_of(about.get("mtime") or about.get("last_modified"))
        return ListedObject(key, int(about["size"]), _version(about), time=time)

    def delete(self, key: str) -> None:
        """See `casckpt.storage.remote.client.Client`."""
        try:
            self._ask("rm_file", self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return

    def examine(self) -> Iterator[Finding]:
        """See `casckpt.storage.remote.client.Client`. Only gcsfs reports a setting: whether a bucket is zonal."""
        if hasattr(self._fs, "_is_zonal_bucket") and self._ask("is_zonal_bucket", self._root.partition("/")[0]):
            found = "the bucket is zonal: gcsfs replaces existing objects there, and does not report failed writes"
            yield Finding("bucket", False, found, "use a bucket in a region")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


class FsspecObject:
    """`casckpt.storage.remote.client.Ranged`."""

    def __init__(self, client: FsspecClient, key: str) -> None:
        self._client, self._key = client, key
        self._size: int | None = None

    def size(self) -> int:
        """See `casckpt.storage.remote.client.Ranged`."""
        if self._size is None:
            self._size = self._client.size(self._key)
        if self._size is None:
            raise NotFound(f"object {self._key} was deleted, or never written", key=self._key)
        return self._size

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `casckpt.storage.remote.client.Ranged`."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        if self.size() < end:
            raise ShortObject(self._key, self.size())
        try:
            data = memoryview(self._client.read(self._key, offset, end))
        except FileNotFoundError as error:
            raise NotFound(f"object {self._key} was deleted, or never written", key=self._key) from error
        if len(data) != end - offset:
            raise ShortObject(self._key, offset + len(data))
        for buffer in buffers:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]


def _version(about: Mapping[str, Any]) -> str:
    """Return the version of a listed object (see `casckpt.storage.base.ListedObject`)."""
    values = (about.get(name) for name in ("ETag", "etag", "generation", "md5Hash", "mtime", "last_modified"))
    return " ".join(str(value) for value in values if value is not None)


def _is_absence(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError | NotADirectoryError) or _status(error) in (404, 410)


def _status(error: Exception) -> int:
    """Return the HTTP status in any client's error, or 0 if there is none."""
    for name in ("status_code", "status", "code"):  # in errors of Azure, aiohttp and gcsfs
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return 0
