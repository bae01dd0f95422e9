from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.base.progress import silent
from casckpt.format.names import TxId
from casckpt.repository.blob_cache import BlobCache
from casckpt.repository.fetching import BlobDamaged
from casckpt.repository.repository import Repository
from tests.repository.test_blob_cache import put
from tests.support.checkpoints import flip
from tests.support.far import FarStore, far
from tests.support.repositories import repository

SIZE = 3 * 4096


UPLOADER = TxId(f"20240101T000000000000Z-{'1' * 16}-{'2' * 16}-3")


@pytest.fixture
def storage() -> FarStore:
    return far()


@pytest.fixture
def repo(tmp_path: Path, storage: FarStore) -> Repository:
    return repository(tmp_path, storage)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "blobs of this host"


@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_a_damaged_blob_does_not_enter_the_cache(repo: Repository, storage: FarStore, root: Path, how: str) -> None:
    cache, ref = BlobCache(root), put(repo, 1)
    key = f"objects/{UPLOADER}/{ref.hash}.safetensors"
    if how == "flipped":
        flip(repo, key, 5000)
    elif how == "short":
        storage.replace(key, storage.get(key, limit=SIZE)[:-1])
    else:
        storage.delete(key)
    with pytest.raises(BlobDamaged) as raised:
        cache.fill(storage, [ref], 2, silent)
    assert raised.value.ref == ref
    assert cache.open(ref) is None
