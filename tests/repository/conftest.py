"""Fixtures for tests of repositories."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.repository.repository import Repository
from tests.support.faulty import FaultyStore
from tests.support.repositories import memory, repository


@pytest.fixture
def faults() -> FaultyStore:
    """The storage of ``repo``, with faults to inject."""
    return FaultyStore(memory())


@pytest.fixture
def repo(tmp_path: Path, faults: FaultyStore) -> Repository:
    """A store without checkpoints."""
    return repository(tmp_path, faults)
