"""Fixtures for most upkeep tests, in addition to ``repo`` and its ``faults``."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.repository.repository import Repository
from tests.repository.conftest import faults, repo
from tests.support.copies import chain, elsewhere
from tests.support.gcs import RemoteStore
from tests.support.repositories import repository

__all__ = ["faults", "remote", "repo", "source", "target"]


@pytest.fixture
def remote(tmp_path: Path) -> Repository:
    """A store on a storage backend that reports itself as remote."""
    return repository(tmp_path, RemoteStore(str(tmp_path)))


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    """A store with run@0 to run@3. Each checkpoint has its own blob and the blobs of its predecessors."""
    return chain(repository(tmp_path))


@pytest.fixture
def target(tmp_path: Path) -> Repository:
    """The empty destination of a copy."""
    return elsewhere(tmp_path)
