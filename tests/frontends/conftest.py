"""Fixtures that several test modules in this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def temporaries(tmp_path: Path) -> Any:
    """Check after the test that an export has left no temporary files."""
    yield
    assert [path for path in tmp_path.rglob("*") if ".casckpt-" in path.name] == []
