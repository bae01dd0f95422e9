"""The programs of docs/examples run and work as documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import casckpt
from tests.support.pages import commands_of, pattern
from tests.support.scripts import run_script

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
_ACTOR = re.compile(
    r"actor: step (\d+): updated by ([\d.]+) MB in [\d.]+ s; a load takes ([\d.]+) MB in [\d.]+ s; says .+"
)
_TRAINER = re.compile(r"trainer: step (\d+): ([\d.]+) MB written in [\d.]+ s")


@pytest.mark.skipif(sys.platform != "linux", reason="the example counts bytes as Linux does")
def test_an_actor_reads_what_its_trainer_publishes() -> None:
    done = run_script(EXAMPLES / "rl_publish_follow.py", "--steps", "3", forks=True)
    assert done.status == 0, done.told
    found = [match.groups() for line in done.printed.splitlines() if (match := _ACTOR.fullmatch(line))]
    steps = [int(step) for step, _, _ in found]
    assert steps == sorted(set(steps))
    assert steps[-1] == 3
    assert all(float(update) < float(load) / 8 for _, update, load in found[1:])
    written = [float(match[2]) for line in done.printed.splitlines() if (match := _TRAINER.fullmatch(line))]
    assert len(written) == 4
    assert max(written[1:]) < written[0] / 8


def test_the_example_reader_without_casckpt_prints_the_documented_output(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "checkpoints")
    for step in (20, 40):
        store.save({"model": {"weight": torch.ones(4, 3, dtype=torch.bfloat16)}, "step": step}, run="train", step=step)
    store.forget("train@20")
    script = EXAMPLES / "read_without_casckpt.py"
    for command, expected in commands_of(script):
        python, name, *arguments = command.split()
        assert (python, name) == ("python", script.name)
        done = subprocess.run(
            [sys.executable, str(script), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(pattern(expected), done.stdout.strip()), done.stdout
