from __future__ import annotations

import errno
import os

import pytest

from casckpt.errors import StorageError
from casckpt.storage.local.store import LocalStore
from tests.support.local import KEY, failing


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ETIMEDOUT, "timed out"),
    ],
)
def test_operating_system_errors_include_advice(
    store: LocalStore, code: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, b"1")
    monkeypatch.setattr(os, "open", failing(os.open, code, times=100))
    for act in (
        lambda: store.put("objects/x/b", b"1"),
        lambda: store.get(KEY, limit=1),
        lambda: store.size(KEY),
        lambda: store.delete(KEY),
        lambda: list(store.list("objects/")),
        lambda: store.settle("objects/x"),
        lambda: store.sweep("objects/x"),
    ):
        with pytest.raises(StorageError, match=f"(?i)objects/x.*{advice}|objects.*{advice}") as caught:
            act()
        assert isinstance(caught.value.__cause__, OSError)
