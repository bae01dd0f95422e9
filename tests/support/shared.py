"""Folders that are created only once for all workers of a test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.repository.processes import alone_on_this_host

_DONE = "done"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that ``make`` fills in the first worker. All other workers wait for it.

    If ``make`` fails, the next worker tries again in a new folder.
    """
    root = factory.getbasetemp() / f"shared-{name}"
    with alone_on_this_host(root / "lock"):
        if not (root / _DONE).exists():
            folder = root / str(sum(1 for _ in root.iterdir()))
            folder.mkdir()
            make(folder)
            (root / _DONE).write_text(folder.name)
        return root / (root / _DONE).read_text()
