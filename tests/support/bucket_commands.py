"""Helpers for several tests of commands on buckets."""

from __future__ import annotations

from typing import Any

from tests.cli.conftest import AsJson
from tests.support.servers import Server


def arguments(server: Server) -> list[str]:
    """Return the command-line options that set these storage_options."""
    return [word for name, value in server.options.items() for word in ("--storage-option", f"{name}={value}")]


def checks(server: Server, bucket: str, as_json: AsJson, status: int = 0) -> dict[str, Any]:
    """Return the checks of doctor by name."""
    result = as_json("doctor", f"s3://{bucket}/store", *arguments(server), status=status)
    assert result["ok"] is (status == 0)
    return {check["name"]: check for check in result["checks"]}
