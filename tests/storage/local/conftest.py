"""Tests of local storage run on the disk, even if `tools/test` keeps the files of other tests in memory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """Return a new folder on the disk."""
    return disk_path
