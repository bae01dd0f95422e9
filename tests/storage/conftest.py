"""What tests of a storage in a folder begin with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from casckpt.storage.local.store import LocalStore

# Looked at when gcsfs is imported, so before any test: it would ask an interface that the imitation lacks, what kind of
# bucket this is, for minutes.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A folder that is not there yet."""
    return LocalStore(tmp_path / "new" / "store")
