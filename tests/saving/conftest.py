"""Fixtures that several tests of saves and loads share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.saves import small_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with small cells and blobs."""
    small_folder(tmp_path / "store")
    return tmp_path / "store"
