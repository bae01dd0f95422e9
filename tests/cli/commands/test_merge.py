"""``casckpt merge``."""

from __future__ import annotations

import pytest
import torch

import casckpt
from tests.cli.conftest import AsJson, Run


@pytest.fixture
def saved(store: casckpt.Store) -> casckpt.Store:
    for step in range(3):
        store.save(
            {"model": {"w": torch.full((3,), float(step)), "n": torch.tensor(step)}, "optimizer": {"m": torch.ones(2)}},
            run="a",
            step=step,
        )
    return store


def test_merge_saves_a_mean(run: Run, as_json: AsJson, saved: casckpt.Store) -> None:
    result = run("merge", saved.url, "a@0..2", "--run", "m", "--step", "1")
    assert result.stdout.startswith("saved m@1 (")
    assert "not combined, but taken from a@2: 'model.n'" in result.stderr
    assert saved.read("m@1")["model"]["w"].tolist() == [1.0] * 3
    found = as_json("merge", saved.url, "a@0", "a@1", "--run", "m", "--step", "2", "--keys", "model.w")
    assert (found["run"], found["step"], found["notes"]) == ("m", 2, [])
    assert saved.read("m@2")["model"]["w"].tolist() == [0.5] * 3


def test_options_of_merge(run: Run, saved: casckpt.Store) -> None:
    for step, (options, want) in enumerate(
        [
            (["--weights", "1,-1/2,.5"], 0.5),
            (["--weights=-1,0,2"], 4.0),
            (["--ema", "0.5"], 1.25),
            (["--half-life", "1"], 1.25),
            (["--dtype", "bfloat16", "--accumulate", "float64", "--keep", "optimizer.*", "--no-strict"], 1.0),
        ]
    ):
        run("merge", saved.url, "a@..", "--run", "m", "--step", str(step), *options)
        assert saved.read(f"m@{step}")["model"]["w"].tolist() == [want] * 3
    assert saved.read("m@4")["optimizer"]["m"].tolist() == [1.0, 1.0]
    run("merge", saved.url, "a@1", "--run", "m", "--step", "0", status=5)
    run("merge", saved.url, "a@1", "--run", "m", "--step", "0", "--overwrite")
    assert saved.read("m@0")["model"]["w"].tolist() == [1.0] * 3
