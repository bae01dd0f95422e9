"""Fixtures and helpers shared by tests of several commands."""

from __future__ import annotations

import os
from pathlib import Path

STATS = {
    "bytes_total", "bytes_written", "bytes_reused", "bytes_coded", "bytes_frames", "bytes_deltas", "blobs_written",
    "blobs_reused", "seconds",
}  # fmt: skip


def damage(store_path: Path) -> str:
    """Flip a bit of "shared" in the largest blob. Return its name."""
    blob = max(store_path.glob("objects/*/*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[12_000] ^= 1
    os.chmod(blob, 0o600)
    blob.write_bytes(data)
    return blob.stem
