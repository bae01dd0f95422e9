"""What tests need of torch, beyond the oldest version that casckpt supports."""

from __future__ import annotations

import re

import pytest
import torch


def has_torch(version: str) -> bool:
    """Return whether torch is at least this version."""
    return torch.__version__ >= version


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Skip the test unless torch is at least this version, with which ``what`` came."""
    return pytest.mark.skipif(not has_torch(version), reason=f"torch {version} added {what}")


LIMITS = {
    r"'Stream' object has no attribute 'record_event'": ("2.8", "forward passes of FSDP2 on the CPU"),
    r"Cannot create a submesh from a submesh": ("2.7", "the meshes that Megatron-FSDP creates"),
    r'first\):\n +File "\S+/support/ranks\.py", line \d+ in _run\n': (
        "2.8",
        "a destroy_process_group that always ends",
    ),
}
"""What older versions of torch do in many tests on several ranks, the version that does not, and what it added."""


def skip_if_torch_lacks(failure: str) -> None:
    """Skip the test if its ranks failed in a way that only an older torch causes."""
    for pattern, (version, what) in LIMITS.items():
        if not has_torch(version) and re.search(pattern, failure):
            pytest.skip(f"torch {version} added {what}")
