"""Saves and loads use a fixed amount of memory in addition to the state, regardless of its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script

MOST = 24  # MiB: two blobs of 1 MiB being written, reads of 8 MiB for each of two threads, and Python itself


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(
    "mib", [pytest.param(64, marks=pytest.mark.soak), 128, pytest.param(256, marks=pytest.mark.soak)]
)
def test_memory_use_beyond_the_state_is_bounded(tmp_path: Path, mib: int) -> None:
    done = run_script("tests.support.peak", tmp_path, f"{mib}")
    assert done.status == 0, done.told
    saved, loaded, saved_again = map(float, done.printed.split())
    assert max(saved, loaded, saved_again) <= MOST
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) >= mib << 20  # nothing is shared
