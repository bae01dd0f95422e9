"""What most tests of upkeep begin with, beside ``repo`` and its ``faults``, as those of repositories."""

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
    """A store in a storage that says it is remote."""
    return repository(tmp_path, RemoteStore(str(tmp_path)))


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    """run@0 to run@3, each with a blob of its own and those of the ones before."""
    return chain(repository(tmp_path))


@pytest.fixture
def target(tmp_path: Path) -> Repository:
    """Where a copy goes: nothing is there yet."""
    return elsewhere(tmp_path)
