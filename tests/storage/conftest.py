"""What tests of a storage in a folder begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A folder that is not there yet."""
    return LocalStore(tmp_path / "new" / "store")
