"""A lock of a host is held while its body runs, despite forked children."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from casckpt.repository.host_lock import alone_on_this_host
from tests.support.forks import forked


def is_free(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_lock_is_held_and_released(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with alone_on_this_host(path):
        assert not is_free(path)
    assert is_free(path)
    with pytest.raises(KeyError), alone_on_this_host(path):
        raise KeyError
    assert is_free(path)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """As a worker of a data loader does, which lives as long as the training: a mirror would wait for its end."""
    path = tmp_path / "lock"
    held = alone_on_this_host(path)
    with held:
        child = forked(lambda: None)
        child.__enter__()
    try:
        assert is_free(path)
    finally:
        child.__exit__(None, None, None)
