"""A load reads a blob from this host's cache, or from the storage after the cached copy was found to be damaged."""

from __future__ import annotations

from unittest.mock import MagicMock, patch

from casckpt.loading.blob_readers import BlobReader


def test_a_damaged_cached_blob_is_dropped_once_and_read_from_the_store() -> None:
    repo, ref = MagicMock(), MagicMock()
    one = BlobReader(repo, ref, shared=False, keep=False)
    with patch.object(one, "_lock", MagicMock()) as lock:
        copy = one.reader()
        assert copy is one.reader()
        assert one.distrust(copy)
        repo.blob_cache.drop.assert_called_once_with(ref)
        source = one.reader()
        assert source is repo.storage.open.return_value.__enter__.return_value
        assert one.distrust(copy), "what another thread has seen, too"
        assert not one.distrust(source)
        assert not one.distrust(None)
        assert lock.__enter__.call_count == 7
    assert repo.blob_cache.drop.call_count == 1


def test_the_last_batch_closes_everything_that_was_opened() -> None:
    repo = MagicMock()
    one = BlobReader(repo, MagicMock(), shared=False, keep=False)
    one.left = 2
    copy, source = repo.blob_cache.open.return_value, repo.storage.open.return_value
    one.distrust(one.reader())
    one.reader()
    with patch.object(one, "_lock", MagicMock()) as lock:
        one.done()
        assert not source.__exit__.called
        one.done()
        assert lock.__enter__.call_count == 2
    assert copy.__exit__.call_count == source.__exit__.call_count == 1
