"""The client for S3 and S3-compatible servers, based on s3fs's client.

s3fs finds credentials and regions, and holds the connections. The requests are made here, because s3fs's methods
switch to multipart uploads (several of which can win the race for one name), and drop parameters that an old client
does not know (such as the condition of a create-only put).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPMessage
from typing import Any, NamedTuple

from aiobotocore.httpsession import AIOHTTPSession
from botocore.endpoint import EndpointCreator
from botocore.exceptions import BotoCoreError, ClientError, ResponseStreamingError
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from casckpt.errors import NotFound, Refused, StorageError, Unsupported
from casckpt.storage.base import AlreadyExists, Finding, ListedObject, ShortObject
from casckpt.storage.remote.calls import read_whole
from casckpt.storage.remote.client import ExplainedFailure, Page, microseconds_of
from casckpt.storage.remote.patience import Loop, Patience, moved
from casckpt.storage.remote.s3.direct import DirectReads, Signed, can_reach, sign
from casckpt.storage.remote.s3.errors import (
    FAILURES,
    WITHOUT_CHECKSUMS,
    as_failure,
    explain,
    is_about_credentials,
    size_from,
    status_of,
)
from casckpt.storage.remote.s3.facts import examine

_PUT_ID = "casckpt-put"  # the name of the metadata that identifies the put that created an object
MOST = 16 << 20  # bytes in a response other than an object: ten times the size of a listing of a thousand long names
_PIECE = 256 << 10  # bytes: the most that is copied if the socket does not accept everything immediately


class _Whole(NamedTuple):
    """A response that has been read completely."""

    data: bytes

    async def read(self) -> bytes:
        """Return all bytes."""
        return self.data


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]  # untyped
    """The client's session, with a limit of `MOST` bytes for responses other than objects."""

    async def send(self, request: Any) -> Any:
        """Send a request. `AIOHTTPSession` would read an unstreamed response without a limit."""
        streams, request.stream_output = request.stream_output, True
        try:
            answer = await super().send(request)
        except asyncio.CancelledError:  # it timed out
            self._drop_idle()
            raise
        finally:
            request.stream_output = streams
        kind, length = (answer.headers.get(name, "") for name in ("Content-Type", "Content-Length"))
        if answer.status_code == 200 and kind.startswith("text/html") and length != "0":  # moto has empty ones
            answer.raw.close()
            raise ResponseParserError(f"{request.url.partition('?')[0]} is a web page, and not part of an S3 server")
        if not streams or answer.status_code >= 300:
            answer.raw = _Whole(await _read(answer.raw, request.url))
        region = answer.headers.get("x-amz-bucket-region")
        if request.method == "HEAD" and answer.status_code in (301, 302, 307) and not region:
            meta = {"HTTPStatusCode": 301, "HTTPHeaders": {}}  # the client would ask for the region by HEAD without end
            raise ClientError({"Error": {"Code": "PermanentRedirect"}, "ResponseMetadata": meta}, "HEAD")
        return answer

    def _drop_idle(self) -> None:
        """Close idle connections: if a server vanished, they would time out one after the other."""
        for session in (self._sessions or {}).values():
            for idle in getattr(session.connector, "_conns", {}).values():  # private, and without a public equivalent
                while idle:
                    idle.pop()[0].close()


async def _read(raw: Any, url: str) -> bytes:
    try:
        return await read_whole(raw.content, MOST, f"the response from {url.partition('?')[0]}, which should be short,")
    except BaseException:
        raw.close()
        raise


log = logging.getLogger(__name__)
_CHUNK = 1 << 20
PAGE = 1000  # the maximum that a server returns
# The client must not retry: if it repeats a put, the first attempt may make the server refuse it. `RemoteStore`
# retries and handles this case.
_CONFIG: Mapping[str, Any] = {
    "max_pool_connections": 64,
    "connect_timeout": 10,
    "retries": {"total_max_attempts": 1},
    "http_session_cls": BoundedSession,
}
_LATER = 5.0  # seconds
_DIRECTORY = "--x-s"  # ends the name of an S3 Express bucket
_TEXTS = ("key", "secret", "token")  # the command line parses an all-digit value as a number


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


class S3Client:
    """`casckpt.storage.remote.client.Client` for one bucket, with keys under ``prefix`` ("" or with a trailing slash).

    Raises TypeError or ValueError for invalid ``options``.
    """

    exclusive: bool | None = None  # some servers silently ignore the condition
    failures = FAILURES

    def __init__(
        self,
        bucket: str,
        prefix: str,
        options: Mapping[str, Any],
        patience: Patience = Patience(),  # noqa: B008 - frozen
    ) -> None:
        given = options.get("config_kwargs", {})
        self.patience = replace(patience, request=float(given.get("read_timeout", patience.request)))
        # the client times out later than casckpt, whose message has advice
        config = {**_CONFIG, **given, "read_timeout": self.patience.request + _LATER}
        secrets = {name: str(options[name]) for name in _TEXTS if options.get(name) is not None}
        self.bucket, self.prefix = bucket, prefix
        self._given = bool(secrets)  # a new session would have the same credentials
        self._renewing, self._renewed = threading.Lock(), -math.inf
        # a new instance, because one cached by s3fs may have different credentials and a different endpoint
        ours = {"config_kwargs": config, "use_listings_cache": False, "skip_instance_cache": True}
        self._fs = S3FileSystem(**{**options, **secrets, **ours})
        self.run = Loop(self._fs.loop, self.patience).run
        try:  # this fails for wrong options; it does not send a request, but may take a while
            client = Loop(self._fs.loop, Patience()).run(as_failure(self._fs.set_session()))
            self.direct = self._direct(client.meta.endpoint_url, given, options.get("client_kwargs") or {})
            self._unread_frames = _sends_frames(client)
        except BotoCoreError as error:
            raise ValueError(explain(error).why) from error

    def _direct(self, endpoint: str, config: Mapping[str, Any], client: Mapping[str, Any]) -> DirectReads | None:
        """Prepare ranged reads that bypass the client, if they would reach the same server in the same way."""
        if not can_reach(endpoint, config):
            return None
        # the client's private rule, which also reads the environment
        rule = getattr(EndpointCreator(None), "_get_verify_value", None)
        if rule is None:
            return None
        verify = client.get("verify")
        if verify is None:
            verify = self._fs.session.get_config_variable("ca_bundle")
        return DirectReads(
            float(config.get("connect_timeout", _CONFIG["connect_timeout"])), self.patience, rule(verify)
        )

    def explain(self, error: Exception) -> ExplainedFailure:
        """See `casckpt.storage.remote.client.Client`."""
        return explain(error)

    def renew(self, error: Exception, began: float) -> bool:
        """See `casckpt.storage.remote.client.Client`. Opens a new session, which looks up credentials again."""
        if not is_about_credentials(error) or self._given:
            return False
        with self._renewing:  # one session for all threads whose requests failed
            if began > self._renewed:
                log.info("the credentials for %s are no longer valid: looking for new ones", self._place)
                try:
                    Loop(self._fs.loop, Patience()).run(as_failure(self._fs.set_session(refresh=True)))
                except FAILURES as failure:
                    log.info("there are none: %s", explain(failure).why)
                    return False
                self._renewed = time.monotonic()
        return True

    def create(self, key: str, data: memoryview, put_id: str) -> None:
        """See `casckpt.storage.remote.client.Client`."""
        try:
            self._put(key, data, put_id, IfNoneMatch="*")
        except ClientError as error:
            if status_of(error) == 412:
                raise AlreadyExists(key) from error
            raise

    def put(self, key: str, data: memoryview, put_id: str) -> None:
        """See `casckpt.storage.remote.client.Client`."""
        self._put(key, data, put_id)

    def _put(self, key: str, data: memoryview, put_id: str, **condition: str) -> None:
        answer = self.call(
            "put_object", Key=self.prefix + key, Metadata={_PUT_ID: put_id}, Body=PutBody(data), **condition
        )
        if self._unread_frames:
            if not any(name.startswith("Checksum") for name in answer):
                self._check_frames(key, len(data))
            self._unread_frames = False

    def _check_frames(self, key: str, size: int) -> None:
        """Raise Unsupported if the server stored the frames and the checksum of an upload as part of the object."""
        if self.size(key) != size:
            with suppress(ClientError):  # writers may lack the permission to delete
                self.delete(key)
            raise Unsupported(f"the server stores the checksums of uploads in the objects; {WITHOUT_CHECKSUMS}")

    def put_id(self, key: str) -> str | None:
        """See `casckpt.storage.remote.client.Client`."""
        put_id: str | None = (self._head(key) or {}).get("Metadata", {}).get(_PUT_ID)
        return put_id

    def get(self, key: str, limit: int) -> bytes:
        """See `casckpt.storage.remote.client.Client`."""
        with self.absence(key):
            return self.run(self._get(key, limit))

    async def _get(self, key: str, limit: int) -> bytes:
        answer = await self.send("get_object", Key=self.prefix + key)
        body = answer["Body"]
        async with body:  # in aiobotocore 2, `with` returns a different value
            size = answer.get("ContentLength", 0)
            if size > limit:
                raise Refused(f"object {key} in {self._place} has {size} bytes, but at most {limit} are allowed")
            return await read_whole(body, limit, f"object {key} in {self._place}")

    def open(self, key: str) -> S3Object:
        """See `casckpt.storage.remote.client.Client`."""
        return S3Object(self, key)

    def size(self, key: str) -> int | None:
        """See `casckpt.storage.remote.client.Client`."""
        answer = self._head(key)
        return None if answer is None else _length(answer)

    def _head(self, key: str) -> Mapping[str, Any] | None:
        try:
            answer: Mapping[str, Any] = self.call("head_object", Key=self.prefix + key)
        except ClientError as error:
            if status_of(error) == 404:
                return None
            if status_of(error) in (301, 400, 401, 403):
                self.call("list_objects_v2", MaxKeys=1)  # its error gives a reason; the error of a HEAD has no body
            raise
        return answer

    def page(self, prefix: str, after: str | None, *, deep: bool) -> Page:
        """See `casckpt.storage.remote.client.Client`."""
        options = {} if deep else {"Delimiter": "/"}
        options |= {} if after is None else {"ContinuationToken": after}
        # S3 Express lists only whole folders
        asked = prefix[: prefix.rfind("/") + 1] if self.bucket.endswith(_DIRECTORY) else prefix
        answer = self.call("list_objects_v2", Prefix=self.prefix + asked, MaxKeys=PAGE, **options)
        if not answer.keys() - {"ResponseMetadata"}:  # otherwise, it would count as a listing without objects
            raise ResponseParserError(f"the response to a listing of {prefix!r} is not a listing")
        skip = len(self.prefix)
        entries = [
            ListedObject(
                item["Key"][skip:], item["Size"], item.get("ETag", ""), time=microseconds_of(item.get("LastModified"))
            )
            for item in answer.get("Contents", ())
        ]
        # skip other programs' "folders"
        files = [entry for entry in entries if entry.key.startswith(prefix) and entry.key and entry.key[-1] != "/"]
        folders = [item["Prefix"][skip:].removesuffix("/") for item in answer.get("CommonPrefixes", ())]
        more = answer.get("NextContinuationToken") if answer.get("IsTruncated") else None
        if answer.get("IsTruncated") and not more:  # otherwise, the rest would appear never to have existed
            raise StorageError(f"the server truncated the listing of {prefix!r} and does not say how to continue")
        return Page(files, folders, more)

    def delete(self, key: str) -> None:
        """See `casckpt.storage.remote.client.Client`. In a versioned bucket, deletes all versions if allowed to."""
        try:
            answer = self.call("delete_object", Key=self.prefix + key)
        except ClientError as error:
            if status_of(error) != 404:
                raise
            return
        if answer.get("DeleteMarker"):
            self._delete_versions(key)

    def _delete_versions(self, key: str) -> None:
        """Delete all versions of an object. Without permission, the versions remain, and `examine` reports them."""
        try:
            listing = self.call("list_object_versions", Prefix=self.prefix + key)
            # markers last, because otherwise the object would become visible again
            for version in [*listing.get("Versions", ()), *listing.get("DeleteMarkers", ())]:
                if version["Key"] == self.prefix + key:
                    self.call("delete_object", Key=version["Key"], VersionId=version["VersionId"])
        except ClientError as error:
            if status_of(error) not in (400, 403, 405, 501):
                raise

    def examine(self) -> Iterator[Finding]:
        """See `casckpt.storage.remote.client.Client`."""
        return examine(self.call, self.prefix)

    # requests

    @contextmanager
    def absence(self, key: str) -> Iterator[None]:
        """Raise NotFound if the object does not exist."""
        try:
            yield
        except ClientError as error:
            if status_of(error) != 404 or error.response["Error"].get("Code") == "NoSuchBucket":
                raise
            raise NotFound(f"object {key} is not in {self._place}: it was deleted or never written", key=key) from error

    @property
    def _place(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def call(self, operation: str, **arguments: Any) -> Any:  # as in botocore
        """Send one request and return the response."""
        return self.run(self.send(operation, **arguments))

    async def send(self, operation: str, **arguments: Any) -> Any:  # see `call`
        """Send one request, adding the parameters in the options. None of ``arguments`` is dropped."""
        client = await self._fs.set_session()
        return await as_failure(getattr(client, operation)(**self._arguments(client, operation, arguments)))

    async def sign_read(self, **arguments: str) -> Signed:
        """Return the request that `send` would send for ``get_object``. This may look up credentials first."""
        client = await self._fs.set_session()
        return await as_failure(sign(client, self._arguments(client, "get_object", arguments)))

    def _arguments(self, client: Any, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        known = model.input_shape.members
        if "IfNoneMatch" in arguments and "IfNoneMatch" not in known:
            raise Unsupported("this S3 client does not support conditional puts: install aiobotocore 2.19 or later")
        extra = {**self._fs.s3_additional_kwargs, **self._fs.req_kw}
        sent = {name: value for name, value in extra.items() if name in known} | dict(arguments)
        if "Metadata" in arguments:
            sent["Metadata"] = {**extra.get("Metadata", {}), **arguments["Metadata"]}
        return {"Bucket": self.bucket, **sent}

    def only_by_client(self) -> None:
        """Record that a ranged read worked through the client. Stop direct reads if none has ever worked."""
        if self.direct is not None and not self.direct.works:
            log.info("reading ranges of %s through the S3 client, because direct reads do not work", self._place)
            self.direct = None


class S3Object:
    """`casckpt.storage.remote.client.Ranged`. Bytes go from the connection's buffer directly to their destination."""

    def __init__(self, client: S3Client, key: str) -> None:
        self._client, self._key = client, key
        self._etag: str | None = None
        self._size: int | None = None
        self._noting = threading.Lock()

    def size(self) -> int:
        """See `casckpt.storage.remote.client.Ranged`."""
        if self._size is None:
            with self._client.absence(self._key):
                answer = self._client.call("head_object", Key=self._client.prefix + self._key)
            self._check_version(answer.get("ETag"), _length(answer))
        return self._size or 0

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `casckpt.storage.remote.client.Ranged`."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        try:
            with self._client.absence(self._key):
                if not self._read_directly(offset, end, buffers):
                    self._client.run(self._read(offset, end, buffers))
                    self._client.only_by_client()
        except ClientError as error:
            if status_of(error) != 416:
                raise
            size = size_from(error.response["ResponseMetadata"]["HTTPHeaders"].get("content-range"))
            raise ShortObject(self._key, self.size() if size is None else size) from error

    def _request(self, offset: int, end: int) -> dict[str, str]:
        return {"Key": self._client.prefix + self._key, "Range": f"bytes={offset}-{end - 1}"}

    def _read_directly(self, offset: int, end: int, buffers: Sequence[memoryview]) -> bool:
        """Read without the client. Returns False if the client must be used."""
        direct = self._client.direct
        if direct is None:
            return False

        def check(headers: HTTPMessage) -> None:
            content_range = headers.get("Content-Range", "")
            size = size_from(content_range)
            if size is None:
                raise Unsupported("this server does not report which range it returned, so casckpt cannot use it")
            _check_offset(offset, content_range)
            self._check_version(headers.get("ETag"), size)
            if size < end:
                raise ShortObject(self._key, size)

        return direct.read(self._client.run(self._client.sign_read(**self._request(offset, end))), buffers, check)

    async def _read(self, offset: int, end: int, buffers: Sequence[memoryview]) -> None:
        answer = await self._client.send("get_object", **self._request(offset, end))
        body = answer["Body"]
        async with body:  # see `S3Client._get`
            size = size_from(answer.get("ContentRange"))
            if size is None and offset:
                raise Unsupported("this server answers a ranged read with the whole object, so casckpt cannot use it")
            if size is not None:
                _check_offset(offset, answer["ContentRange"])
            self._check_version(answer.get("ETag"), _length(answer) if size is None else size)
            if self.size() < end:
                raise ShortObject(self._key, self.size())
            await _fill(body, buffers)

    def _check_version(self, etag: str | None, size: int) -> None:
        """Remember the object's version. Raises StorageError if an earlier response had a different version."""
        with self._noting:
            if self._size is None:
                self._etag, self._size = etag, size
        if (self._etag, self._size) != (etag, size):
            message = f"object {self._key} was replaced while casckpt was reading it; read it again"
            raise StorageError(message, key=self._key)


def _sends_frames(client: Any) -> bool:
    """Return whether a client sends the checksum of an upload after its bytes, in frames that a server must parse."""
    calculated = getattr(client.meta.config, "request_checksum_calculation", None)
    return calculated == "when_supported" and client.meta.endpoint_url.startswith("https:")


def _check_offset(offset: int, content_range: str) -> None:
    """Raise Unsupported if the response is for a different range.

    A cache between client and server may mix up ranges.
    """
    if not content_range.startswith(f"bytes {offset}-"):
        raise Unsupported(
            f"the server answers a read from byte {offset} with {content_range!r}, so casckpt cannot use it"
        )


def _length(answer: Mapping[str, Any]) -> int:
    """Return the size of an object as reported by the server."""
    length = answer.get("ContentLength")
    if length is None:
        raise Unsupported("this server does not report the size of an object, so casckpt cannot use it")
    return int(length)


async def _fill(body: Any, buffers: Sequence[memoryview]) -> None:
    """Fill buffers with the bytes of a response as they arrive."""
    left = sum(buffer.nbytes for buffer in buffers)
    rest = iter(buffers)
    place = next(rest, memoryview(b""))
    while left:
        chunk = memoryview(await body.read(min(left, _CHUNK)))
        if not chunk:
            raise ResponseStreamingError(error=f"the response ended {left} bytes early")
        left -= len(chunk)
        moved(len(chunk))
        while chunk:
            part = min(len(chunk), len(place))
            place[:part] = chunk[:part]
            chunk, place = chunk[part:], place[part:]
            if not place:
                place = next(rest, place)
