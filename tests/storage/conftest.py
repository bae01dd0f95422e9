"""Fixtures for tests of storage in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.store import LocalStore

# gcsfs reads this when it is imported, so it must be set before any test. Otherwise, gcsfs would spend minutes asking
# for the kind of bucket, which the emulator does not support.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> LocalStore:
    """A store in a folder that does not exist yet, of a single writer if the test needs one to name its files."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return LocalStore(tmp_path / "new" / "store", single_writer=given.get("way") is Naming.ALONE)
