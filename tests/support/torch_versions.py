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


LIMITS = {
    "'Stream' object has no attribute 'record_event'": ("2.8", "forward passes of FSDP2 on the CPU"),
    "Cannot create a submesh from a submesh": ("2.7", "the meshes that Megatron-FSDP creates"),
}
"""Errors of older versions of torch that many tests on several ranks meet, the version without them, and its news."""


def skip_if_torch_lacks(error: str) -> None:
    """Skip the test if its ranks failed with an error that only an older torch raises."""
    for text, (version, what) in LIMITS.items():
        if text in error and not has_torch(version):
            pytest.skip(f"torch {version} added {what}")
