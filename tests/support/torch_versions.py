"""What tests need of torch, beyond the oldest version that casckpt supports."""

from __future__ import annotations

import pytest
import torch


def has_torch(version: str) -> bool:
    """Return whether torch is at least this version."""
    return torch.__version__ >= version


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Skip the test unless torch is at least this version, with which ``what`` came."""
    return pytest.mark.skipif(not has_torch(version), reason=f"torch {version} added {what}")
