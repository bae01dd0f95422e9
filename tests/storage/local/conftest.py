"""Tests of local storage run on the disk, even if `tools/test` keeps the files of other tests in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a new folder on the disk."""
    with tempfile.TemporaryDirectory(prefix="casckpt-test-") as folder:
        yield Path(folder)
