from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import StorageError
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.store import RemoteStore
from tests.storage.remote.test_fsspec_client import Folder


def test_storage_errors_become_casckpt_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Exception):
        """An error of a cloud client."""

    def fail(*_: Any, **__: Any) -> None:
        raise Odd("the cloud is gone")

    storage = RemoteStore(Folder(tmp_path), backoff=Backoff(sleep=lambda seconds: None))
    monkeypatch.setattr(storage._clients.get()._fs, "find", fail)  # type: ignore[attr-defined]  # of fsspec
    with pytest.raises(StorageError, match="tried 8 times: Odd: the cloud is gone"):
        list(storage.list(""))
