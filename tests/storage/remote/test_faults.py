"""Network and server faults: requests are retried, and a retried put recognizes its own earlier attempt."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from casckpt.errors import CasckptError, NotFound, StorageError, Unsupported
from casckpt.storage.base import AlreadyExists, ListedObject, ShortObject
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.s3.client import S3Client
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from tests.storage.contract import noise
from tests.support.proxy import Proxy, Trouble
from tests.support.servers import Server

MIB = 1 << 20
TROUBLES = list(Trouble)


@pytest.fixture
def bucket(moto_server: Server) -> str:
    return moto_server.new_bucket()


@pytest.fixture
def proxy(moto_server: Server) -> Iterator[Proxy]:
    with Proxy(moto_server.endpoint) as proxy:
        yield proxy


class Naps:
    """Records sleeps without sleeping."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture
def storage(moto_server: Server, proxy: Proxy, bucket: str, naps: Naps) -> RemoteStore:
    options = {**moto_server.options, "endpoint_url": proxy.endpoint}
    return RemoteStore(RemoteLocation("s3", f"{bucket}/store", options), backoff=Backoff(sleep=naps))


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_put_succeeds_despite_network_faults(
    trouble: Trouble, storage: RemoteStore, proxy: Proxy, moto_server: Server, bucket: str
) -> None:
    data = noise(MIB)
    proxy.plan(trouble, method="PUT", times=2)
    storage.put("commits/1", data)
    assert moto_server.look(bucket, "store/commits/1") == data
    with pytest.raises(AlreadyExists):
        storage.put("commits/1", noise(MIB, seed=1))
    assert moto_server.look(bucket, "store/commits/1") == data


@pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.BROKEN, Trouble.BUSY])
def test_a_put_with_network_faults_raises_conflict_if_the_key_exists(
    trouble: Trouble, storage: RemoteStore, proxy: Proxy
) -> None:
    storage.put("commits/1", b"first")
    proxy.plan(trouble, method="PUT")
    with pytest.raises(AlreadyExists):
        storage.put("commits/1", b"other")
    assert storage.get("commits/1", limit=9) == b"first"


@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_kind_of_request_is_retried(trouble: Trouble, storage: RemoteStore, proxy: Proxy) -> None:
    data, buffer = noise(3 * MIB), bytearray(MIB)
    storage.put("objects/x/a", data)
    for method in ("GET", "HEAD"):
        proxy.plan(trouble, method=method, times=2)
    assert storage.size("objects/x/a") == len(data)
    assert storage.get("objects/x/a", limit=len(data)) == data
    with storage.open("objects/x/a") as reader:
        proxy.plan(trouble, method="GET", times=2)
        reader.read_into(5, [memoryview(buffer)])
        assert buffer == data[5 : 5 + MIB]
    proxy.plan(trouble, method="GET", times=2)
    assert list(storage.list("objects/")) == [ListedObject("objects/x/a", len(data))]
    proxy.plan(trouble, method="DELETE", times=2)
    storage.delete("objects/x/a")
    assert storage.size("objects/x/a") is None


@pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.BUSY, Trouble.HALF])
def test_faults_that_do_not_end_raise_an_error_that_names_them(
    trouble: Trouble, storage: RemoteStore, proxy: Proxy, naps: Naps
) -> None:
    proxy.plan(trouble, times=1000)
    for act in (
        lambda: storage.put("a", b"1"),
        lambda: storage.get("a", limit=1),
        lambda: storage.size("a"),
        lambda: list(storage.list("")),
        lambda: storage.delete("a"),
    ):
        with pytest.raises(StorageError, match=r"tried 8 times: .*try again"):
            act()
    assert len(naps.seconds) == 5 * 7
    assert sum(naps.seconds[:7]) < 13


def test_a_conflict_after_faults_remains_a_conflict_if_the_object_is_unreadable(
    storage: RemoteStore, proxy: Proxy
) -> None:
    proxy.plan(Trouble.LOST, method="PUT")
    proxy.plan(Trouble.BUSY, method="HEAD", times=1000)
    with pytest.raises(AlreadyExists):
        storage.put("a", b"1")


def test_requests_with_permanent_errors_are_not_retried(moto_server: Server, proxy: Proxy, naps: Naps) -> None:
    options = {**moto_server.options, "endpoint_url": proxy.endpoint}
    storage = RemoteStore(RemoteLocation("s3", "no-such-bucket/store", options), backoff=Backoff(sleep=naps))
    for act in (lambda: storage.put("a", b"1"), lambda: list(storage.list(""))):
        with pytest.raises(NotFound, match="no such bucket: create it first"):
            act()
    assert naps.seconds == []


def test_a_refused_connection_is_reported(naps: Naps, moto_server: Server) -> None:
    options = {**moto_server.options, "endpoint_url": "http://127.0.0.1:1"}
    storage = RemoteStore(RemoteLocation("s3", "bucket/store", options), backoff=Backoff(sleep=naps))
    with pytest.raises(StorageError, match=r"s3://bucket/store/a.*tried 8 times.*check the network and the endpoint"):
        storage.size("a")
    assert len(naps.seconds) == 7


def test_wrong_credentials_are_reported(seaweed_server: Server, naps: Naps) -> None:
    bucket = seaweed_server.new_bucket()
    for wrong, says in ({"secret": "guess"}, "secret key does not match"), ({"key": "nobody"}, "does not know this"):
        options = seaweed_server.options | wrong
        storage = RemoteStore(RemoteLocation("s3", f"{bucket}/store", options), backoff=Backoff(sleep=naps))
        for act in (lambda: storage.put("a", b"1"), lambda: storage.size("a"), lambda: list(storage.list(""))):  # noqa: B023 - called here
            with pytest.raises(StorageError, match=says) as caught:
                act()
            assert not any(secret in str(caught.value) for secret in ("guess", "nobody", *map(str, options.values())))
    assert naps.seconds == []


def test_https_to_an_http_server_is_reported(moto_server: Server, naps: Naps) -> None:
    options = {**moto_server.options, "endpoint_url": moto_server.endpoint.replace("http:", "https:")}
    storage = RemoteStore(RemoteLocation("s3", "bucket/store", options), backoff=Backoff(sleep=naps))
    with pytest.raises(StorageError, match="check that the endpoint supports https"):
        storage.size("a")


def test_missing_credentials_are_reported(moto_server: Server, monkeypatch: pytest.MonkeyPatch, naps: Naps) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    options = {"endpoint_url": moto_server.endpoint}
    storage = RemoteStore(RemoteLocation("s3", "bucket/store", options), backoff=Backoff(sleep=naps))
    with pytest.raises(StorageError, match="no credentials were found"):
        storage.size("a")


def test_environment_variables_are_read_when_a_store_is_opened(
    seaweed_server: Server, moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in (seaweed_server, moto_server):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.options["endpoint_url"])
        bucket = server.new_bucket()
        RemoteStore(RemoteLocation("s3", f"{bucket}/store", {})).put("a", b"1")
        assert server.client.head_object(Bucket=bucket, Key="store/a")["ContentLength"] == 1


@pytest.mark.parametrize("options", [{"nonsense": 1}, {"client_kwargs": {"nonsense": 1}}, {"config_kwargs": {"no": 1}}])
def test_unknown_client_options_are_reported(options: dict[str, Any]) -> None:
    storage = RemoteStore(RemoteLocation("s3", "bucket/store", {"key": "k", "secret": "hidden", **options}))
    with pytest.raises(CasckptError, match="storage_options") as caught:
        storage.size("a")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_exactly_one_concurrent_put_succeeds_despite_faults(
    seed: int, storage: RemoteStore, proxy: Proxy, moto_server: Server, bucket: str
) -> None:
    proxy.chaos(seed, share=0.4)
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        try:
            storage.put("commits/1", noise(1000, number))
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert moto_server.look(bucket, "store/commits/1") == noise(1000, won.index(True))


def test_objects_have_both_casckpt_metadata_and_user_metadata(moto_server: Server, bucket: str) -> None:
    extra = {"s3_additional_kwargs": {"Metadata": {"team": "a"}, "StorageClass": "STANDARD_IA"}}
    RemoteStore(RemoteLocation("s3", f"{bucket}/store", moto_server.options | extra)).put("a", b"1")
    found = moto_server.client.head_object(Bucket=bucket, Key="store/a")
    assert found["StorageClass"] == "STANDARD_IA"
    assert set(found["Metadata"]) == {"team", "casckpt-put"}


def test_a_large_object_is_put_in_one_request(storage: RemoteStore, proxy: Proxy) -> None:
    """s3fs alone would upload the object in parts, and several such uploads can succeed in a race."""
    storage.put("objects/x/a", bytes(101 * MIB))
    puts = [one for one in proxy.seen if one.method != "HEAD"]
    assert [(one.method, one.query) for one in puts] == [("PUT", "")]


def test_the_s3_client_reuses_connections(storage: RemoteStore, proxy: Proxy) -> None:
    storage.put("a", noise(MIB))
    buffer = memoryview(bytearray(MIB // 2))
    with storage.open("a") as reader:
        for _ in range(20):
            reader.read_into(7, [buffer])
            storage.size("a")
    assert proxy.connections == 2  # one for the client, one for ranged reads
    assert proxy.count("GET") == 20


def test_reads_from_a_bucket_run_concurrently(storage: RemoteStore, proxy: Proxy) -> None:
    """There are as many connections as the traits promise, and no connection waits for the response of a
    different one."""
    data = noise(64 * 1000)
    storage.put("a", data)
    parallel = storage.traits.parallel
    assert parallel >= 32
    together = threading.Barrier(parallel)

    def part(number: int) -> bytes:
        buffer = bytearray(1000)
        together.wait()
        reader.read_into(1000 * number, [memoryview(buffer)])
        return bytes(buffer)

    proxy.plan(Trouble.LATE, method="GET", times=parallel)
    with storage.open("a") as reader, ThreadPoolExecutor(parallel) as pool:
        assert b"".join(pool.map(part, range(parallel))) == data[: 1000 * parallel]
    assert proxy.connections > parallel // 2


@pytest.mark.parametrize("ranged", [False, True])
def test_connections_that_died_unnoticed_cost_a_single_timeout(
    ranged: bool, moto_server: Server, proxy: Proxy, bucket: str, naps: Naps
) -> None:
    """All idle connections are dead: after the first timeout, the call uses a new one."""
    options = {**moto_server.options, "endpoint_url": proxy.endpoint, "request_timeout": 2, "call_timeout": 12}
    storage = RemoteStore(RemoteLocation("s3", f"{bucket}/store", options), backoff=Backoff(sleep=naps))
    storage.put("a", b"0123456789")

    def look(_: int) -> None:
        if ranged:
            storage.open("a").read_into(0, [memoryview(bytearray(10))])
        else:
            storage.size("a")

    proxy.slow("*", 0.3)  # so that each request of the pool needs its own connection
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look, range(8)))
    proxy.calm()
    proxy.abandon()
    look(0)
    assert len(naps.seconds) <= 1


def test_a_server_that_ignores_ranges_is_rejected(storage: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("a", b"0123456789")
    client = storage._clients.get()
    arguments = client._arguments  # type: ignore[attr-defined]  # of S3

    def whole(s3: Any, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments(s3, operation, given).items() if name != "Range"}

    monkeypatch.setattr(client, "_arguments", whole)
    buffer = bytearray(3)
    with storage.open("a") as reader:
        reader.read_into(0, [memoryview(buffer)])
        assert buffer == b"012"
        with pytest.raises(Unsupported, match="whole object"):
            reader.read_into(2, [memoryview(buffer)])


def test_a_reader_never_mixes_two_objects(storage: RemoteStore) -> None:
    storage.put("a", b"0123456789")
    buffer = memoryview(bytearray(5))
    with storage.open("a") as reader:
        reader.read_into(0, [buffer])
        storage.replace("a", b"9876543210")
        with pytest.raises(StorageError, match="replaced while casckpt was reading it"):
            reader.read_into(5, [buffer])
    with storage.open("a") as reader:
        assert reader.size == 10
        storage.replace("a", b"012")
        with pytest.raises((StorageError, ShortObject)):
            reader.read_into(5, [buffer])


def test_a_call_from_the_event_loop_of_the_client_raises_an_error(storage: RemoteStore) -> None:
    storage.size("a")
    loop = storage._clients.get()._fs.loop  # type: ignore[attr-defined]  # of S3

    async def call() -> None:
        storage.size("a")

    with pytest.raises(Unsupported, match="event loop"):
        asyncio.run_coroutine_threadsafe(call(), loop).result(timeout=30)


@pytest.mark.parametrize("nbytes", [1, 64 * MIB])
def test_a_server_that_does_not_accept_bytes_raises_an_error(nbytes: int, naps: Naps) -> None:
    """The server accepts connections but is silent, so the client would wait forever for permission to continue."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        place = RemoteLocation("s3", "bucket/store", {**options, "config_kwargs": {"read_timeout": 0.2}})
        storage = RemoteStore(place, backoff=Backoff(attempts=2, sleep=naps))
        with pytest.raises(StorageError, match=r"s3://bucket/store/a, tried 2 times: .*the server was silent"):
            storage.put("a", memoryview(bytearray(nbytes)))
        with pytest.raises(StorageError, match=r"tried 2 times: .*request_timeout"):
            storage.size("a")


def test_a_refused_delete_raises_an_error(moto_server: Server, naps: Naps, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RemoteLocation("s3", f"{moto_server.new_place()}/store", moto_server.options)
    storage, call = RemoteStore(place, backoff=Backoff(sleep=naps)), S3Client.call
    storage.put("a", b"1")

    def refuse(self: S3Client, operation: str, **arguments: Any) -> Any:
        if operation == "delete_object":
            raise ClientError(
                {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "DeleteObject"
            )
        return call(self, operation, **arguments)

    monkeypatch.setattr(S3Client, "call", refuse)
    with pytest.raises(StorageError, match="cannot delete"):
        storage.delete("a")
    assert storage.size("a") == 1
