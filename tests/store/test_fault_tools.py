"""Fault tools of others: strace makes system calls of plain commands fail, and LazyFS loses what was not synced."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import run_script

PATIENCE = 8 * 3600.0  # seconds, for --full on a busy machine
pytestmark = [pytest.mark.kill, pytest.mark.sweep, pytest.mark.timeout(PATIENCE)]
ROOT = Path(__file__).parents[2]
COUNT = 300  # with --full


def can_trace() -> bool:
    """Report whether strace is installed, and may trace here."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode == 0


def test_a_system_call_that_fails_ends_a_command_with_a_clear_error_and_loses_nothing(
    tmp_path: Path, full: bool, seed: int
) -> None:
    if not can_trace():
        pytest.skip("needs strace, and permission to trace")
    how = ("plain", tmp_path / "runs", str(COUNT)) if full else ("forked", tmp_path / "runs", "4")
    jobs = () if full else ("save", "gc")
    done = run_script("tests.support.injected", *how, str(seed), *jobs, cwd=ROOT, patience=PATIENCE)
    assert done.status == 0, done.printed + done.told


@pytest.mark.soak
def test_power_losses_on_lazyfs_lose_nothing_that_was_saved(
    tmp_path: Path, seed: int, pytestconfig: pytest.Config
) -> None:
    checkout = pytestconfig.getoption("--lazyfs")
    if checkout is None:
        pytest.skip("needs a built checkout of LazyFS, and root: --lazyfs CHECKOUT")
    arguments = (checkout, tmp_path / "rounds", str(COUNT), str(seed))
    done = run_script("tests.support.lost_cache", *arguments, cwd=ROOT, patience=PATIENCE)
    assert done.status == 0, done.told
