"""Fixtures of several modules of tests here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def temporaries(tmp_path: Path) -> Any:
    """After the test: no temporary file of an export is left."""
    yield
    assert [path for path in tmp_path.rglob("*") if ".casckpt-" in path.name] == []
