"""ckpt-chaos, a tool of others, kills training runs at each change of their checkpoints and resumes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import FINAL
from tests.support.tally import tally

runner: Any = pytest.importorskip("ckpt_chaos.runner", reason="needs ckpt-chaos")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]
ROOT = Path(__file__).parent.parent
OPTIONS = {
    "--step-regex": r"resumed from step (\d+)",
    "--result-file": f"{{out}}/{FINAL}",
    "--checkpoint-glob": "{out}/saved-*",
    "--max-points": "10000",
    "--jobs": "2",
}


def verdicts(how: str, folder: Path) -> Counter[str]:
    """Return how often ckpt-chaos reached each verdict about a run that it killed and resumed."""
    options = [word for option in OPTIONS.items() for word in option]
    command = [sys.executable, "-m", "ckpt_chaos", "run", *options, "--work", str(folder / "work")]
    training = [sys.executable, "-m", "tests.support.chaos", how, "{out}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--", *training], cwd=ROOT, env=environment, check=False, capture_output=True)
    rows = runner.rejudge(folder / "work")
    assert rows, done.stderr.decode()
    control, *killed = rows
    assert control.verdict == "PASS"
    assert all(row.crashed for row in killed)
    return Counter(row.verdict for row in killed)


def test_a_training_run_that_ckpt_chaos_kills_continues_from_the_last_save_that_returned(tmp_path: Path) -> None:
    counts = verdicts("casckpt", tmp_path)
    assert set(counts) == {"PASS"}, counts
    assert counts["PASS"] > 50
    tally("ckpt-chaos: killed and resumed", counts["PASS"])


def test_ckpt_chaos_detects_saves_that_overwrite_their_only_file(tmp_path: Path) -> None:
    assert verdicts("overwrite", tmp_path)["HARD_FAIL"] > 0
