"""What most tests of repositories begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.repository.repository import Repository
from tests.support.copies import chain, elsewhere
from tests.support.faulty import FaultyStore
from tests.support.gcs import RemoteStore
from tests.support.repositories import memory, repository


@pytest.fixture
def faults() -> FaultyStore:
    """The storage of ``repo``, which does what is injected."""
    return FaultyStore(memory())


@pytest.fixture
def repo(tmp_path: Path, faults: FaultyStore) -> Repository:
    """A store without checkpoints."""
    return repository(tmp_path, faults)


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
