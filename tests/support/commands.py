"""Fixtures and helpers shared by tests of several commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.cli.conftest import AsJson
from tests.support.servers import Server

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


def arguments(server: Server) -> list[str]:
    """Return the command-line options that set these storage_options."""
    return [word for name, value in server.options.items() for word in ("--storage-option", f"{name}={value}")]


def checks(server: Server, bucket: str, as_json: AsJson, status: int = 0) -> dict[str, Any]:
    """Return the checks of doctor by name."""
    result = as_json("doctor", f"s3://{bucket}/store", *arguments(server), status=status)
    assert result["ok"] is (status == 0)
    return {check["name"]: check for check in result["checks"]}
