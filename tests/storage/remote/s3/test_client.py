from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from casckpt.errors import CasckptError, StorageError
from casckpt.storage import open_storage
from casckpt.storage.base import ObjectStore
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.s3 import client as remotes3
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from tests.storage.remote.s3.test_direct import client_of
from tests.support.certificates import make_certificate
from tests.support.proxy import Proxy
from tests.support.quirks import Answer, Quirk, Request
from tests.support.servers import Server

CALLS: Mapping[str, Callable[[ObjectStore], object]] = {
    "put": lambda storage: storage.put("a", b"12345678"),
    "replace": lambda storage: storage.replace("a", b"12345678"),
    "get": lambda storage: storage.get("a", limit=1 << 20),
    "read": lambda storage: storage.open("a").__enter__().read_into(1, [memoryview(bytearray(4))]),
    "size": lambda storage: storage.size("a"),
    "list": lambda storage: list(storage.list("commits/")),
    "list_folder": lambda storage: storage.list_folder("objects"),
}


class Answering(Quirk):
    """Answers all requests with 200 and the same body, like the web page of a proxy or of a server's console."""

    def __init__(self, kind: str, data: bytes) -> None:
        self.answer = Answer(200, "OK", [("Content-Type", kind)], data)

    def ask(self, request: Request) -> Answer | None:
        return self.answer


def test_a_listing_can_span_many_pages(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes3, "PAGE", 7)
    bucket = moto_server.new_bucket()
    for number in range(21):
        moto_server.client.put_object(Bucket=bucket, Key=f"store/commits/{number}", Body=b"")
    moto_server.client.put_object(Bucket=bucket, Key="store/commits/", Body=b"")  # as browsers do
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    assert sorted(entry.key for entry in storage.list("commits/")) == sorted(f"commits/{n}" for n in range(21))


def test_a_listing_that_ends_early_is_an_error(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a listing is truncated, the missing objects seem never to have existed."""
    monkeypatch.setattr(remotes3, "PAGE", 7)
    bucket = moto_server.new_bucket()
    for number in range(9):
        moto_server.client.put_object(Bucket=bucket, Key=f"store/commits/{number}", Body=b"")
    call = remotes3.S3Client.call

    def without_token(self: remotes3.S3Client, operation: str, **arguments: Any) -> Any:
        answer = call(self, operation, **arguments)
        return {name: value for name, value in answer.items() if name != "NextContinuationToken"}

    monkeypatch.setattr(remotes3.S3Client, "call", without_token)
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    with pytest.raises(StorageError, match=r"truncated the listing of 'commits/'"):
        list(storage.list("commits/"))


def test_a_missing_bucket_does_not_count_as_empty(moto_server: Server) -> None:
    storage = open_storage("s3://nobody-made-this/store", moto_server.options)
    for look in (lambda: list(storage.list("commits/")), lambda: storage.list_folder("objects")):
        with pytest.raises(CasckptError, match="nobody-made-this"):
            look()


def test_a_delete_in_a_versioned_bucket_frees_the_bytes_of_the_object(moto_server: Server) -> None:
    bucket, client = moto_server.new_bucket(), moto_server.client
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    storage.put("objects/a", b"1")
    storage.put("objects/ab", b"2")
    storage.delete("objects/a")
    left = client.list_object_versions(Bucket=bucket)
    assert [one["Key"] for one in left["Versions"]] == ["store/objects/ab"]
    assert "DeleteMarkers" not in left
    storage.put("objects/a", b"3")
    assert storage.get("objects/a", limit=1) == b"3"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("page", [b"<!DOCTYPE html><p>Please log in", b"<html><body><p>Console</p></body></html>"])
def test_a_web_page_is_not_the_response_of_a_server(call: str, page: bytes, moto_server: Server) -> None:
    with Proxy(moto_server.endpoint, None, [Answering("text/html; charset=utf-8", page)]) as proxy:
        location = RemoteLocation("s3", "bucket/store", {**moto_server.options, "endpoint_url": proxy.endpoint})
        url = f"{proxy.endpoint}/bucket"
        with pytest.raises(StorageError, match=rf"s3://bucket/store/.*: {url}\S* is a web page.*check .* the endpoint"):
            CALLS[call](RemoteStore(location, backoff=Backoff(attempts=1)))


@pytest.mark.parametrize("body", [b"", b"<html><body><p>Console</p></body></html>"])
def test_a_response_that_is_not_a_listing_does_not_count_as_an_empty_one(body: bytes, moto_server: Server) -> None:
    with Proxy(moto_server.endpoint, None, [Answering("application/xml", body)]) as proxy:
        location = RemoteLocation("s3", "bucket/store", {**moto_server.options, "endpoint_url": proxy.endpoint})
        for call in ("list", "list_folder"):
            with pytest.raises(StorageError, match="is not a listing"):
                CALLS[call](RemoteStore(location, backoff=Backoff(attempts=1)))


def resolving(monkeypatch: pytest.MonkeyPatch, resolve: Callable[[str], str | None]) -> None:
    """Resolve the host names for which ``resolve`` returns an address. It may raise an error."""
    real = socket.getaddrinfo

    def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
        return real(resolve(host) or host if isinstance(host, str) else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


def test_a_host_name_that_does_not_resolve_is_named_after_seconds(
    moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str) -> str | None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolving(monkeypatch, resolve)
    pauses: list[float] = []
    options = {**moto_server.options, "endpoint_url": "http://s3.typo.invalid"}
    storage = RemoteStore(RemoteLocation("s3", "bucket/store", options), backoff=Backoff(sleep=pauses.append))
    for call in CALLS.values():
        pauses.clear()
        with pytest.raises(StorageError, match=r"http://s3\.typo\.invalid.*; check the network and the endpoint"):
            call(storage)
        assert sum(pauses) < 20


@pytest.mark.parametrize("call", CALLS)
def test_a_host_name_that_resolves_later_only_delays_a_call(
    call: str, moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, bucket = urlsplit(moto_server.endpoint), moto_server.new_bucket()
    moto_server.client.put_object(Bucket=bucket, Key="store/a", Body=b"12345678")
    failures = 3 * [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")]

    def resolve(host: str) -> str | None:
        if host == "late" and failures:
            raise failures.pop()
        return where.hostname if host == "late" else None

    resolving(monkeypatch, resolve)
    options = {**moto_server.options, "endpoint_url": f"http://late:{where.port}"}
    storage = RemoteStore(RemoteLocation("s3", f"{bucket}/store", options), backoff=Backoff(sleep=lambda _: None))
    if call == "put":
        storage.put("b", b"1")
    else:
        CALLS[call](storage)
    assert not failures


class HasHostNames(Quirk):
    """Finds the bucket in the host name, before ".s3.test", and refuses paths that contain it."""

    def __init__(self) -> None:
        self.hosts = set[str]()

    def ask(self, request: Request) -> Answer | None:
        host = request.headers["Host"].partition(":")[0]
        self.hosts.add(host)
        request.headers.replace_header("Host", "127.0.0.1")
        if host.endswith(".s3.test"):
            request.target = f"/{host.removesuffix('.s3.test')}{request.target}"
        return None


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("dots", [False, True], ids=["plain", "dots"])
def test_a_bucket_can_be_part_of_the_host_name(
    is_tls: bool, dots: bool, moto_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate for ``*.s3.test`` does not cover a bucket name with dots, which is therefore in the path."""
    bucket = f"bucket{'.with.dots' * dots}-of-{'tls' if is_tls else 'tcp'}"
    moto_server.client.create_bucket(Bucket=bucket)
    resolving(monkeypatch, lambda host: "127.0.0.1" if host.endswith("s3.test") else None)
    certificate = make_certificate(tmp_path, "*.s3.test", "s3.test") if is_tls else None
    names = HasHostNames()
    with Proxy(moto_server.endpoint, certificate, [names]) as proxy:
        options = {
            **moto_server.options,
            "endpoint_url": proxy.endpoint.replace("127.0.0.1", "s3.test"),
            "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            "client_kwargs": {"verify": str(certificate)} if is_tls else {},
        }
        storage = RemoteStore(RemoteLocation("s3", f"{bucket}/store", options))
        storage.put("a", b"12345678")
        assert [entry.key for entry in storage.list("")] == ["a"]
        CALLS["read"](storage)
        direct = client_of(storage).direct
        assert direct is not None
        assert direct.works
    assert names.hosts == {"s3.test" if is_tls and dots else f"{bucket}.s3.test"}
