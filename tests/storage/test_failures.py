from __future__ import annotations

import errno
import os
import pickle

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
        assert not caught.value.full


@pytest.mark.parametrize(
    ("code", "full", "advice"),
    [
        (errno.ENOSPC, True, "the disk is full.*casckpt gc"),
        (errno.EDQUOT, True, "quota is used up.*casckpt gc"),
        (errno.EFBIG, False, "ulimit -f"),
        (errno.EIO, False, "kernel log"),
    ],
)
def test_an_error_says_whether_the_disk_is_full(
    store: LocalStore, code: int, full: bool, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, code))
    with pytest.raises(StorageError, match=advice) as caught:
        store.put(KEY, b"1")
    assert pickle.loads(pickle.dumps(caught.value)).full is full
