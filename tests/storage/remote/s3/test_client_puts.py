"""A put sends the caller's memory without copying all of it, and sends it again in each attempt."""

from __future__ import annotations

import asyncio
import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.s3.client import PutBody
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from tests.storage.contract import noise
from tests.support.certificates import make_certificate
from tests.support.proxy import Proxy, Trouble
from tests.support.servers import Server

MIB = 1 << 20
SIZES = (0, 1, MIB, 2 * MIB + 5)


@pytest.mark.parametrize("size", SIZES)
def test_the_body_of_a_put_can_be_read_like_a_file(size: int) -> None:
    data = noise(size)
    body, file = PutBody(memoryview(data)), io.BytesIO(data)
    assert len(body) == size
    for act in (
        lambda f: bytes(f.read(5)), lambda f: f.tell(), lambda f: f.seek(0, 2), lambda f: bytes(f.read(1)),
        lambda f: f.seek(1), lambda f: bytes(f.read()), lambda f: f.seek(-1 if size else 0, 1), lambda f: f.seek(0),
        lambda f: bytes(f.read(None)), lambda f: bytes(f.read(-1)),
    ):  # fmt: skip
        assert act(body) == act(file)


@pytest.mark.parametrize("size", SIZES)
def test_the_body_of_a_put_can_be_iterated_repeatedly(size: int) -> None:
    data = noise(size)
    body = PutBody(memoryview(data))

    async def pieces(count: int | None) -> list[bytes]:
        found: list[bytes] = []
        async for piece in body:
            found.append(bytes(piece))
            if len(found) == count:
                break
        return found

    asyncio.run(pieces(1))  # an interrupted attempt
    body.read(7)
    assert b"".join(asyncio.run(pieces(None))) == data


def test_a_put_does_not_copy_the_whole_object(seaweed_server: Server) -> None:
    storage = RemoteStore(RemoteLocation("s3", f"{seaweed_server.new_place()}/store", seaweed_server.options))
    storage.put("first", b"what a client needs once is made now")
    data = memoryview(bytearray(24 * MIB))
    tracemalloc.start()
    storage.put("large", data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MIB


# https: the body is not signed, and its checksum follows it


@pytest.fixture(params=["moto", "seaweed"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return make_certificate(tmp_path)


@pytest.fixture
def proxy(server: Server, certificate: Path) -> Iterator[Proxy]:
    with Proxy(server.endpoint, certificate) as proxy:
        yield proxy


def test_objects_are_put_over_https(server: Server, proxy: Proxy, certificate: Path) -> None:
    bucket = server.new_place()
    options = {**server.options, "endpoint_url": proxy.endpoint, "client_kwargs": {"verify": str(certificate)}}
    storage = RemoteStore(RemoteLocation("s3", f"{bucket}/store", options), backoff=Backoff(sleep=lambda seconds: None))
    for size in SIZES:
        storage.put(f"{size}", noise(size))
        assert server.look(bucket, f"store/{size}") == noise(size)
    for trouble in Trouble:
        proxy.plan(trouble, method="PUT", times=2)
        storage.put(trouble.name, noise(MIB))
        assert server.look(bucket, f"store/{trouble.name}") == noise(MIB)
    assert {one.payload for one in proxy.seen if one.method == "PUT"} == {"STREAMING-UNSIGNED-PAYLOAD-TRAILER"}
