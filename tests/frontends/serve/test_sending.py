"""File transfers with damaged bytes, slow clients, and clients that disconnect."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch

import casckpt
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, NotFound, StorageError
from casckpt.frontends.serve import sending, server
from casckpt.frontends.serve.folders import FileSpan, ServedFolders
from casckpt.frontends.serve.hub import commit_of
from casckpt.frontends.serve.sending import _MOST_IDLE, Leases, RangeResponse
from casckpt.store.store import Store
from tests.support.saves import blob_keys, flip, small, small_folder
from tests.support.serving import serving

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")


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
    monkeypatch.setattr(sending, "LINGER_SECONDS", 0.0)
    with serving(small_store) as served:
        for _ in range(3):
            assert served.get(WEIGHTS).status == 200
    assert sum("cannot acquire a lease" in one.message for one in caplog.records if one.levelno >= logging.WARNING) == 1


def test_many_clients_read_at_the_same_time_in_bounded_memory(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(3 << 20, dtype=torch.int64)}}, run="sft", step=1)
    folders = ServedFolders(store, 1 << 30)
    folder = folders.of(store.get("sft@1"))
    file = folder.files["model.safetensors"]

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never

    async def all_at_once(count: int) -> list[bytes]:
        desk, found = sending.Desk(store, folders), [bytearray() for _ in range(count)]

        async def send(number: int, message: Any) -> None:
            found[number] += message.get("body", b"")

        responses = [RangeResponse(desk, folder, file, FileSpan(0, file.nbytes), {}) for _ in range(count)]
        await asyncio.gather(*(one({}, receive, partial(send, number)) for number, one in enumerate(responses)))
        assert 0 < len(desk.buffers._free) <= sending.WINDOWS
        assert desk.slots._value == sending.WINDOWS, "all memory is free again"
        desk.close()
        return [bytes(one) for one in found]

    found = asyncio.run(all_at_once(sending.WINDOWS + 4))
    assert len(found[0]) == file.nbytes
    assert set(found) == {found[0]}


# clients that misbehave


def test_clients_that_do_not_read_hold_windows_only_until_they_are_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(server, "STUCK_SECONDS", 0.5)
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.zeros(16 << 20)}}, run="sft", step=1)
    with serving(store) as served:
        with ExitStack() as held:
            for _ in range(sending.WINDOWS + 4):
                raw = held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                raw.sendall(b"GET " + weights_of(store).encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert len(served.body(WEIGHTS)) > 60 << 20  # other clients are not delayed for long
            while len([one for one in caplog.records if "disconnected after" in one.message]) < sending.WINDOWS + 4:
                time.sleep(0.05)
        assert served.get("/api/models").status == 200


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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace leases with a record of the steps that have one."""
    found = list[int]()

    @contextmanager
    def lease(_: Store, checkpoint: Checkpoint, **__: Any) -> Iterator[None]:
        found.append(checkpoint.step)
        yield
        found.remove(checkpoint.step)

    monkeypatch.setattr(Store, "lease", lease)
    return found


def saved(count: int) -> tuple[Store, list[Checkpoint]]:
    store = small()
    for step in range(count):
        store.save({"w": torch.ones(1)}, step=step)
    return store, store.checkpoints()


def test_the_number_of_idle_leases_is_limited(taken: list[int]) -> None:
    store, found = saved(_MOST_IDLE + 4)
    leases = Leases(store)
    with leases.hold(found[0]):
        for one in (*found[1:], found[2]):
            with leases.hold(one):
                assert one.step in taken
        assert sorted(taken) == [0, 2, *range(5, _MOST_IDLE + 4)]
    leases.close()
    assert not taken


def test_a_lease_acquired_during_shutdown_is_ended(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    store, (one,) = saved(1)
    leases, lease = Leases(store), Store.lease

    @contextmanager
    def at_the_end(*args: Any, **options: Any) -> Iterator[Checkpoint]:
        leases.close()
        with lease(*args, **options) as held:
            yield held

    monkeypatch.setattr(Store, "lease", at_the_end)
    with leases.hold(one):
        pass
    assert not taken


class Timer:
    """A timer that the test fires manually."""

    made: ClassVar[list[Timer]] = []

    def __init__(self, seconds: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.seconds, self.fire = seconds, partial(call, *args)
        self.daemon = self.is_on = False
        self.made.append(self)

    def start(self) -> None:
        self.is_on = True

    def cancel(self) -> None:
        self.is_on = False


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    monkeypatch.setattr(Timer, "made", found := list[Timer]())
    monkeypatch.setattr(threading, "Timer", Timer)
    return found


def test_a_lease_remains_for_a_while_after_its_last_user(taken: list[int], timers: list[Timer]) -> None:
    store, (one,) = saved(1)
    leases = Leases(store)
    with leases.hold(one):
        with leases.hold(one):
            assert taken == [0]
        assert timers == []
    assert (timers[0].seconds, timers[0].daemon, timers[0].is_on, taken) == (sending.LINGER_SECONDS, True, True, [0])
    with leases.hold(one):
        assert not timers[0].is_on
        timers[0].fire()  # it had just fired
        assert taken == [0]
    timers[1].fire()
    assert taken == []
    with leases.hold(one):
        timers[1].fire()
        assert taken == [0]
    leases.close()
    assert taken == []
    assert not timers[2].is_on


def test_simultaneous_requests_for_a_checkpoint_share_a_lease(taken: list[int], timers: list[Timer]) -> None:
    store, (one,) = saved(1)
    leases, lease, start = Leases(store), Store.lease, Timer.start

    def taking(*args: Any, **options: Any) -> Any:
        assert leases._held[one.id].lock.locked()
        assert not leases._lock.locked(), "other clients must be served in the meantime"
        return lease(*args, **options)

    def starting(timer: Timer) -> None:
        assert leases._lock.locked()
        start(timer)

    with patch.object(Store, "lease", taking), patch.object(Timer, "start", starting), leases.hold(one):
        pass
    with patch.object(leases, "_lock", MagicMock()) as lock:
        leases.close()
    lock.__enter__.assert_called_once_with()
    assert taken == []


def test_failures_to_acquire_leases_are_logged_once(
    timers: list[Timer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, found = saved(3)
    errors: list[CasckptError] = [StorageError("only reads"), NotFound("purged"), StorageError("only reads")]
    monkeypatch.setattr(Store, "lease", Mock(side_effect=errors))
    leases = Leases(store)
    with caplog.at_level(logging.DEBUG, "casckpt"):
        for one in found:
            with leases.hold(one):
                pass
    said = [(one.levelname, one.getMessage()) for one in caplog.records if "lease" in one.getMessage()]
    assert [level for level, _ in said] == ["WARNING", "INFO", "DEBUG"]
    assert "cannot acquire a lease, so a gc may delete data that is being sent: only reads" in said[0][1]
    assert "is sent without a lease: purged" in said[1][1]
