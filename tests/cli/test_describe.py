from __future__ import annotations

import json
from pathlib import Path

import torch

import casckpt
from tests.cli.conftest import Run


def test_the_error_for_a_missing_run_lists_the_runs(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.save({"w": torch.zeros(1)}, run="pretrain", step=1)
    for command, status in (("list", 0), ("gc", 1)):
        found = run(command, saved, "--run", "pretrian", "--json", status=status)
        assert json.loads(found.stdout) is not None
        assert "there is no checkpoint of run 'pretrian' in" in found.stderr
        assert "did you mean pretrain?" in found.stderr
        assert "there is no checkpoint" not in run(command, saved, "--run", "a").stderr
    store.forget("b@1")
    found = run("list", saved, "--run", "b")
    assert "1 was forgotten: see `casckpt list --all`" in found.stderr
    assert found.stdout == "no checkpoints\n"
    assert not run("list", saved, "--run", "b", "--all").stderr
    assert not run("gc", saved, "--run", "b").stderr


def test_json_represents_nan_and_infinity_as_null(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.save({"a": torch.zeros(1)}, run="n", step=0, metadata={"loss": float("nan"), "all": [float("inf"), 1.5]})
    for command in (("show", saved, "n@0"), ("list", saved)):
        assert "NaN" not in run(*command, "--json").stdout
    assert json.loads(run("show", saved, "n@0", "--json").stdout)["metadata"] == {"loss": None, "all": [None, 1.5]}
