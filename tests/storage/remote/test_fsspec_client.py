"""Storage backends that are supported only through fsspec: their guarantees and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import NotFound, StorageError, Unsupported
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.storage.remote.client import Client
from casckpt.storage.remote.fsspec_client import FsspecClient
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from tests.storage.contract import Peek, StorageContract


@dataclass(frozen=True)
class Folder:
    """A folder accessed through fsspec, as a stand-in for any fsspec storage."""

    path: Path

    @property
    def url(self) -> str:
        return f"local://{self.path}"

    def __call__(self) -> Client:
        return FsspecClient(self.url, {})


class TestOneWriter(StorageContract):
    """The contract without two guarantees: fsspec checks before it writes, and does not distinguish object versions."""

    test_exactly_one_of_several_threads_creates_a_key: Callable[..., None] | None = None  # type: ignore[assignment]  # not promised
    test_an_open_reader_does_not_mix_two_objects: Callable[..., None] | None = None  # type: ignore[assignment]  # nor this

    @pytest.fixture
    def storage(self, tmp_path: Path) -> ObjectStore:
        return RemoteStore(Folder(tmp_path / "store"), single_writer=True)

    @pytest.fixture
    def peek(self, tmp_path: Path) -> Peek:
        def look(key: str) -> bytes | None:
            path = tmp_path / "store" / key
            return path.read_bytes() if path.is_file() else None

        return look


def test_storage_without_exclusive_creates_rejects_a_second_writer(tmp_path: Path) -> None:
    storage = RemoteStore(Folder(tmp_path / "store"))
    with pytest.raises(Unsupported, match="in one step"):
        Repository(storage, tmp_path / "cache").create()
    assert not (tmp_path / "store").exists()
    assert Repository(storage, tmp_path / "cache", single_writer=True).create()


def test_a_retry_is_skipped_if_its_pause_exceeds_the_remaining_time(tmp_path: Path) -> None:
    class Odd(Exception):
        """An error of a cloud client."""

    def fail(_: Client) -> None:
        raise Odd

    naps: list[float] = []
    storage = RemoteStore(Folder(tmp_path), backoff=Backoff(first=3, most=100, chance=lambda: 0, sleep=naps.append))
    with pytest.raises(StorageError, match=r"cannot read .*/a, tried 6 times: .*no call waits longer than 180 s"):
        storage.again("read", "a", fail)
    assert naps == [3, 6, 12, 24, 48]
    with pytest.raises(StorageError, match=r"after an earlier timeout, this call had only 15 s"):
        storage.again("read", "a", fail)
    assert naps[5:] == [3, 6]
    assert storage.again("read", "a", lambda _: 1) == 1
    with pytest.raises(StorageError, match="180 s"):
        storage.again("read", "a", fail)


@pytest.mark.parametrize(
    ("status", "says"),
    [(403, "check the credentials"), (404, "create it first"), (400, "again"), (507, "raise the quota")],
)
def test_requests_with_permanent_errors_are_not_retried(
    status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer(Exception):
        """A server's response as cloud clients report it."""

        status_code = status

    def fail(*_: Any, **__: Any) -> None:
        raise Answer

    naps: list[float] = []
    storage = RemoteStore(Folder(tmp_path), backoff=Backoff(sleep=naps.append))
    monkeypatch.setattr(storage._clients.get()._fs, "find", fail)  # type: ignore[attr-defined]  # of fsspec
    with pytest.raises(StorageError if status != 404 else NotFound, match=says) as caught:
        list(storage.list(""))
    assert naps == []
    assert getattr(caught.value, "full", False) is (status == 507)


class Unwell(BaseHTTPRequestHandler):
    """A server that answers every request with 503, and those below /none/ with 404."""

    def do_GET(self) -> None:
        self.send_error(404 if self.path.startswith("/none/") else 503)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Do not log anything to stderr."""


def test_web_server_errors_do_not_mean_missing_objects() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Unwell) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        for folder, absent in (("store", False), ("none", True)):
            place = RemoteLocation("http", f"127.0.0.1:{server.server_address[1]}/{folder}", {})
            storage = RemoteStore(place, backoff=Backoff(attempts=2, sleep=lambda seconds: None))
            with pytest.raises(NotFound if absent else StorageError) as caught:
                storage.get("casckpt.json", limit=9)
            assert ("deleted or never written" in str(caught.value)) == absent
            if absent:
                assert storage.size("casckpt.json") is None
            else:
                with pytest.raises(StorageError, match="503"):
                    storage.size("casckpt.json")
        server.shutdown()
