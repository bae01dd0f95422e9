"""tools/soak for a minute; and that it notices what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOAK = (sys.executable, ROOT / "tools" / "_soak.py")


def soak(hours: float, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*map(str, (*SOAK, hours, *arguments))]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, capture_output=True, text=True, timeout=250
    )


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.soak
def test_a_minute_and_another_one_that_goes_on(tmp_path: Path, seed: int) -> None:
    first = counts(soak(30 / 3600, "--folder", tmp_path, "--seed", seed))
    second = counts(soak(30 / 3600, "--folder", tmp_path, "--seed", seed + 1))
    assert second["seconds"] > first["seconds"] >= 30
    assert min(second[what] for what in ("save", "gc", "killed", "verify", "copy", "load under a lease", "update")) > 5
    assert second["save"] > first["save"]
    assert second["grown"] == []


@pytest.mark.soak
def test_a_flipped_byte_ends_it(tmp_path: Path) -> None:
    counts(soak(5 / 3600, "--folder", tmp_path))
    for blob in (tmp_path / "store" / "objects").rglob("*.safetensors"):
        blob.chmod(0o600)
        data = bytearray(blob.read_bytes())
        data[5000] ^= 1
        blob.write_bytes(data)
    done = soak(60 / 3600, "--folder", tmp_path)
    assert done.returncode != 0
    assert "damaged" in done.stderr
