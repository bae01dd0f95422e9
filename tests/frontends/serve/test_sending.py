"""File transfers with damaged bytes, slow clients, and clients that disconnect."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
import casckpt
from casckpt.errors import StorageError
from casckpt.frontends.serve import leases, sending
from casckpt.frontends.serve.folders import FileSpan, ServedFolders
from casckpt.frontends.serve.names import commit_of
from casckpt.frontends.serve.sending import RangeReader, RangeResponse, Window
from casckpt.store.store import Store
from tests.support.saves import blob_keys, flip, small_folder
from tests.support.serving import serving

WEIGHTS = "/sft/resolve/main/model.safetensors"


def weights_of(store: Store, step: int = 1) -> str:
    """Return the path of the weights."""
    return f"/sft/resolve/{commit_of(store.get(f'sft@{step}').id)}/model.safetensors"


# damage


def damaged(tmp_path: Path, at: int) -> tuple[Store, bytes, int]:
    """Return a store with a file of several windows and one flipped bit, the file, and the bit's position."""
    store = casckpt.open(tmp_path / "store")
    value = torch.arange(3 << 20, dtype=torch.int64)  # 24 MiB
    store.save({"model": {"w": value}}, run="sft", step=1)
    with serving(store) as served:
        whole = served.body(WEIGHTS)
    (key,) = blob_keys(store)
    flip(store, key, 4096 + at)
    return store, whole, len(whole) - value.nbytes + at


def test_a_flipped_byte_in_the_store_truncates_the_response(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, whole, place = damaged(tmp_path, 17 << 20)
    with serving(store) as served, pytest.raises(http.client.IncompleteRead) as error:
        served.get(WEIGHTS)
    found = error.value.partial
    assert found == whole[: len(found)]
    assert len(found) <= place
    assert len(found) > 8 << 20
    assert any("failed after" in one.message and "is damaged" in one.message for one in caplog.records)
    with serving(store) as served:
        wrong = served.get(WEIGHTS, Range=f"bytes={place}-{place}")
        assert (wrong.status, "is damaged" in wrong.headers["X-Error-Message"]) == (500, True)
        assert served.body(WEIGHTS, Range="bytes=0-999999") == whole[:1_000_000]


def test_a_client_never_receives_damaged_bytes_and_resumes_after_a_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    hub: Any = pytest.importorskip("huggingface_hub", reason="needs casckpt[transformers]")
    errors: Any = pytest.importorskip("huggingface_hub.errors", reason="needs casckpt[transformers]")
    store, whole, _ = damaged(tmp_path, 17 << 20)
    twin = casckpt.open(tmp_path / "twin")
    twin.save({"model": {"w": torch.arange(3 << 20, dtype=torch.int64)}}, run="sft", step=1)
    cache = tmp_path / "hub"
    with serving(store) as served:
        options = {"endpoint": served.endpoint, "cache_dir": cache, "token": False}
        with pytest.raises(errors.HfHubHTTPError, match="is damaged"):
            hub.hf_hub_download("sft", "model.safetensors", **options)
        assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 1000]
        store.verify()
        store.repair(twin)
        monkeypatch.setattr(sending, "monotonic", lambda: time.monotonic() + sending.REMEMBERED_SECONDS)
        found = Path(hub.hf_hub_download("sft", "model.safetensors", **options))
    assert found.read_bytes() == whole


def test_a_purged_checkpoint_is_not_served_from_memory(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    for step in (1, 2):
        store.save({"model": {"w": torch.arange(200_000) + step}}, run="sft", step=step)
    commit = commit_of(store.get("sft@1").id)
    path = f"/sft/resolve/{commit}/model.safetensors"
    with serving(store) as served:
        served.get(path, "HEAD")
        store.forget("sft@1")
        assert len(served.body(path)) > 1_600_000  # it remains available under its id until the purge
        store.gc(min_age=0)
        gone = served.get(path)
        assert (gone.status, gone.headers["X-Error-Code"]) == (404, "RevisionNotFound")
        assert served.get(path).status == 404


def test_gc_keeps_checkpoints_that_are_being_sent(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    for step in (1, 2):
        store.save({"model": {"w": torch.arange(4 << 20) + step}}, run="sft", step=step)
    with serving(store) as served:
        whole = served.body("/sft/resolve/1/model.safetensors")
        with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
            connection.request("GET", weights_of(store))
            answer = connection.getresponse()
            found = answer.read(1000)
            assert any(name.startswith("lease-") for name in store.tags())
            store.gc(keep_last=1, min_age=0)
            found += answer.read()
        assert found == whole
    assert not any(name.startswith("lease-") for name in store.tags())
    assert store.gc(keep_last=1, min_age=0).deleted_blobs


def test_a_server_without_leases_warns_once(
    small_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise StorageError("access denied")

    monkeypatch.setattr(Store, "lease", refuse)
    monkeypatch.setattr(leases, "LINGER_SECONDS", 0.0)
    with serving(small_store) as served:
        for _ in range(3):
            assert served.get(WEIGHTS).status == 200
    assert sum("cannot acquire a lease" in one.message for one in caplog.records if one.levelno >= logging.WARNING) == 1


def test_a_window_needed_by_several_clients_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(3 << 20, dtype=torch.int64)}}, run="sft", step=1)
    folders = ServedFolders(store, None, 1 << 30)
    folder, read, read_of = folders.of(store.get("sft@1")), list[int](), RangeReader.read
    file = folder.files["model.safetensors"]

    def counted(reader: RangeReader, window: Window, buffer: memoryview) -> memoryview:
        read.append(window.start)
        return read_of(reader, window, buffer)

    monkeypatch.setattr(RangeReader, "read", counted)

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never

    async def all_at_once(count: int) -> list[bytes]:
        desk, barrier, found = sending.Desk(store, folders), asyncio.Barrier(count), [bytearray() for _ in range(count)]

        async def send(number: int, message: Any) -> None:
            found[number] += message.get("body", b"")
            await barrier.wait()  # all clients start together

        responses = [RangeResponse(desk, folder, file, FileSpan(0, file.nbytes), {}) for _ in range(count)]
        await asyncio.gather(*(one({}, receive, partial(send, number)) for number, one in enumerate(responses)))
        assert not desk.windows
        assert len(desk.buffers._free) == 2
        desk.close()
        return [bytes(one) for one in found]

    found = asyncio.run(all_at_once(5))
    assert len(found[0]) == file.nbytes
    assert set(found) == {found[0]}
    assert read == sorted(set(read))


# clients that misbehave


def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.zeros(16 << 20)}}, run="sft", step=1)
    with serving(store, guard={"slow_seconds": 0.5}) as served:
        with ExitStack() as held:
            for _ in range(sending.WINDOWS + 4):
                raw = held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                raw.sendall(b"GET " + weights_of(store).encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert len(served.body(WEIGHTS)) > 60 << 20  # other clients are not delayed for long
            while len([one for one in caplog.records if "stopped reading" in one.message]) < sending.WINDOWS + 4:
                time.sleep(0.05)
        assert served.get("/").status == 200


@pytest.mark.parametrize("at", ["http.response.start", "the end"])
def test_a_client_that_reads_neither_the_start_nor_the_end_is_disconnected(tmp_path: Path, at: str) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(1000)}}, run="sft", step=1)
    folders = ServedFolders(store, None, 1 << 30)
    folder = folders.of(store.get("sft@1"))
    file = folder.files["model.safetensors"]

    async def never(*_: object) -> Any:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        is_end = message["type"] == "http.response.body" and not message["more_body"]
        if at == ("the end" if is_end else message["type"]):
            await never()

    async def run() -> None:
        desk = sending.Desk(store, folders, slow_seconds=0.1)
        await asyncio.wait_for(RangeResponse(desk, folder, file, FileSpan(0, file.nbytes), {})({}, never, send), 20)
        assert not desk.windows
        assert len(desk.buffers._free) == 1
        desk.close()

    asyncio.run(run())


def test_a_client_that_disconnects_ends_its_response(
    small_store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.zeros(16 << 20)}}, run="sft", step=1)
    with serving(store) as served:
        raw = socket.create_connection(("127.0.0.1", served.port))
        raw.sendall(b"GET " + weights_of(store).encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw.recv(1000)
        raw.close()
        while not any("the client disconnected" in one.message for one in caplog.records):
            time.sleep(0.05)
