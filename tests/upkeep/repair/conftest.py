"""Fixtures shared by several test modules in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.repository.repository import Repository
from tests.support.repositories import repository


@pytest.fixture
def other(tmp_path: Path) -> Repository:
    """A second store."""
    return repository(tmp_path / "other", seed=2)
