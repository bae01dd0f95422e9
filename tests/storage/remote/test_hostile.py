"""Servers that never respond or never finish: every call to them ends with an error without exhausting memory."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import casckpt
from casckpt.errors import CasckptError, InvalidInput, Refused, StorageError
from casckpt.repository.repository import Repository
from casckpt.storage import open_storage
from casckpt.storage.base import ObjectStore
from casckpt.storage.remote.client import Client
from casckpt.storage.remote.fsspec_client import FsspecClient
from casckpt.storage.remote.patience import Backoff, Call, Patience, PatientRequest, reporting_to
from casckpt.storage.remote.s3.client import PutBody
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.upkeep import doctor
from tests.support.hostile import Hostile, Hostility, hostile

MIB: Final = 1 << 20


IMPATIENT: Final = {"request_timeout": 0.3, "call_timeout": 0.4}


WAITS: Final = [one for one in Hostility if one not in (Hostility.HEADERS, Hostility.BODY)]


Act = Callable[[ObjectStore], object]


def read(storage: ObjectStore) -> None:
    with storage.open("objects/x/a") as reader:
        reader.read_into(0, [memoryview(bytearray(1000))])


def size_of_reader(storage: ObjectStore) -> object:
    with storage.open("objects/x/a") as reader:
        return reader.size


READS: Final[Mapping[str, Act]] = {
    "get": lambda storage: storage.get("casckpt.json", limit=MIB),
    "read": read,
    "size": lambda storage: storage.size("a"),
    "size of a reader": size_of_reader,
    "list": lambda storage: list(storage.list("commits/")),
    "list_folder": lambda storage: storage.list_folder("objects"),
}


WRITES: Final[Mapping[str, Act]] = {
    "put": lambda storage: storage.put("a", b"1"),
    "put of 8 MiB": lambda storage: storage.put("a", bytes(8 * MIB)),
    "replace": lambda storage: storage.replace("a", b"1"),
    "delete": lambda storage: storage.delete("a"),
}


def s3(server: Hostile, patience: Mapping[str, float] = IMPATIENT) -> ObjectStore:
    return open_storage("s3://bucket/store", {"key": "k", "secret": "s", "endpoint_url": server.endpoint, **patience})


def google(server: Hostile) -> ObjectStore:
    return open_storage("gs://bucket/store", {"token": "anon", "endpoint_url": server.endpoint, **IMPATIENT})


def azure(server: Hostile) -> ObjectStore:
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=a2V5;"
        f"BlobEndpoint={server.endpoint}/devstoreaccount1;"
    )
    return open_storage("az://bucket/store", {"connection_string": connection, **IMPATIENT})


def outcomes(storage: ObjectStore, acts: Mapping[str, Act], attempts: int = 8) -> dict[str, CasckptError | None]:
    """Return the outcomes of concurrent calls."""
    storage._backoff = Backoff(attempts=attempts)  # type: ignore[attr-defined]  # it is remote

    def outcome(act: Act) -> CasckptError | None:
        try:
            act(storage)
        except CasckptError as error:
            return error
        return None

    with ThreadPoolExecutor(len(acts)) as pool:
        return dict(zip(acts, pool.map(outcome, acts.values()), strict=True))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostility", WAITS)
def test_every_call_to_a_hostile_server_ends(hostility: Hostility) -> None:
    with hostile(hostility, "206 Partial Content") as server:
        found = outcomes(s3(server), {**READS, **WRITES})
    for name, error in found.items():
        if hostility is Hostility.DRIP_BODY:  # a HEAD has no body, so the slow bytes look like the next response
            assert isinstance(error, StorageError) or name.startswith("size")
        else:
            assert "_timeout in storage_options)" in str(error), name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostility", [Hostility.SILENT, Hostility.DRIP])
@pytest.mark.parametrize("kind", [google, azure])
def test_every_call_to_a_hostile_server_of_a_different_cloud_ends(
    kind: Callable[[Hostile], ObjectStore], hostility: Hostility
) -> None:
    with hostile(hostility) as server:
        found = outcomes(kind(server), {**READS, **WRITES} | {"put of 8 MiB": WRITES["put"]})
    assert {name: type(error) for name, error in found.items()} == dict.fromkeys(found, StorageError)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostility", [Hostility.HEADERS, Hostility.BODY])
def test_bytes_beyond_the_expected_size_are_not_accepted(hostility: Hostility) -> None:
    """This is so even with unlimited timeouts."""
    with hostile(hostility, "206 Partial Content") as server:
        storage = s3(server, {})
        for name, act in {**READS, **WRITES}.items():
            before = server.sent
            (error,) = outcomes(storage, {name: act}, attempts=1).values()
            fine = hostility is Hostility.BODY and (name.startswith("size") or name == "read")
            # Rejected because of the body's size, unless the client fails first because of the bytes after a response.
            expected = (Refused, StorageError) if hostility is Hostility.BODY else StorageError
            assert fine or isinstance(error, expected), name
            assert server.sent - before < 30 * MIB, name  # a response from S3 may have 16 MiB


@pytest.mark.timeout(60)
def test_reading_the_settings_of_a_silent_bucket_times_out(tmp_path: Path) -> None:
    with hostile(Hostility.SILENT) as server:
        storage = s3(server)
        with pytest.raises(StorageError, match=r"cannot read the settings of s3://bucket/store: .*request_timeout"):
            list(storage.examine())  # type: ignore[attr-defined]  # it is remote
        found = list(doctor.examine(Repository(storage, tmp_path)))
    assert [one.name for one in found if not one.ok] == ["write", "settings", "store"]


@pytest.mark.timeout(60)
def test_a_hanging_file_system_times_out() -> None:
    """fsspec calls the file system in our thread, which cannot be interrupted."""

    class Hanging:
        url = "local:///nowhere"

        def __call__(self) -> Client:
            return FsspecClient(self.url, {}, Patience(request=0.05, call=0.1))

    ends = threading.Event()
    storage = RemoteStore(Hanging())
    storage._clients.get()._fs = None  # type: ignore[attr-defined]  # of fsspec
    file_system: Any = storage._clients.get()._ask.fs  # type: ignore[attr-defined]  # the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(file_system), "find", lambda *_, **__: ends.wait())
        with pytest.raises(StorageError, match="call_timeout"):
            list(storage.list("commits/"))
        ends.set()


# slow, correct servers


@contextmanager
def slow(pause: float) -> Iterator[str]:
    """Run a server that sends 32 KiB at a time and then pauses. It has one object of 512 KiB."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = connection.recv(1 << 16)
            said = "HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-524287/524288\r\nContent-Length: 524288\r\n"
            connection.sendall(f"{said}Connection: close\r\n\r\n".encode())
            for _ in range(0 if asked.startswith(b"HEAD") else 16):
                connection.sendall(bytes(1 << 15))
                over.wait(pause)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        over.set()
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.timeout(60)
def test_casckpt_waits_for_a_slow_server_that_makes_progress() -> None:
    """Each transfer takes longer than the time limits for silence and for a call."""

    def fill(storage: ObjectStore) -> None:
        with storage.open("a") as reader:
            reader.read_into(0, [memoryview(bytearray(512 << 10))])

    patience = {"request_timeout": 2.0, "call_timeout": 2.5}  # a busy machine may pause for a second
    with slow(0.17) as place:
        given = {"key": "k", "secret": "s", "endpoint_url": f"http://{place}", **patience}
        storage = open_storage("s3://bucket/store", given)
        found = outcomes(storage, {"get": lambda one: one.get("a", limit=MIB), "read": fill}, attempts=1)
        assert found == {"get": None, "read": None}


def test_each_piece_of_a_put_that_the_server_accepts_counts_as_progress() -> None:
    ticks = iter(range(0, 1000, 2))
    one = PatientRequest(Call(Patience(request=10, call=20)), 10, clock=lambda: next(ticks))

    async def send() -> None:
        with reporting_to(one):
            async for _ in PutBody(memoryview(bytes(4 * MIB))):
                assert one.left > 0

    asyncio.run(send())
    assert next(ticks) > 30


# messages


def test_timeout_options_are_rejected_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="call_timeout"):
        casckpt.open(tmp_path / "store", storage_options={"call_timeout": 5})


def test_an_invalid_timeout_is_rejected(tmp_path: Path) -> None:
    for url in ("s3://bucket/store", "gs://bucket/store"):
        with pytest.raises(
            InvalidInput, match="request_timeout in storage_options must be a number of seconds above 0"
        ):
            open_storage(url, {"request_timeout": -1}).size("a")


def test_a_pickled_storage_keeps_its_timeouts() -> None:
    place = RemoteLocation("s3", "bucket/store", {"key": "k", "secret": "s", **IMPATIENT})
    assert pickle.loads(pickle.dumps(RemoteStore(place)))._clients.get().patience == Patience(0.3, 0.4)
    assert replace(place, options={})().patience == Patience(60, 180)
