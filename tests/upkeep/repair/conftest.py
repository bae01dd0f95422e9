"""Fixtures shared by several test modules in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.contents import blobs
from casckpt.repository.repository import Repository
from tests.support.repositories import repository


@pytest.fixture
def other(tmp_path: Path) -> Repository:
    """A second store."""
    return repository(tmp_path / "other", seed=2)


def marks(repo: Repository) -> set[str]:
    return {blob for _, blob in blobs.damaged_marks(repo)}


def hash_in(key: str) -> str:
    return Path(key).name.partition(".")[0]
