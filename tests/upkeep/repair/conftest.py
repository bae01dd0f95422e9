"""Fixtures that several test modules here share."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.repository.repository import Repository
from tests.support.repositories import repository


@pytest.fixture
def other(tmp_path: Path) -> Repository:
    """Another store."""
    return repository(tmp_path / "other", seed=2)
