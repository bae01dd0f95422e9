from __future__ import annotations

import os
from pathlib import Path

import torch

import casckpt
from tests.cli.conftest import AsJson, Run
from tests.support.commands import damage


def test_repair_takes_bytes_from_another_store(saved: Path, tmp_path: Path, as_json: AsJson, run: Run) -> None:
    other = casckpt.open(tmp_path / "other")
    other.save({"shared": torch.arange(5000.0), "own": torch.full((1000,), 1.0), "lr": 0.1}, run="a", step=1)
    blob = damage(saved)
    as_json("verify", saved, status=4)
    lost = as_json("repair", saved, status=4)
    assert [one["blob"] for one in lost["lost"]] == [blob]
    assert "--from" in run("repair", saved, status=4).stdout.splitlines()[-1]
    assert as_json("repair", saved, "--from", tmp_path / "other")["blobs"] == [blob]
    as_json("verify", saved)


def test_repair_reports_that_it_does_not_repair_records(saved: Path, as_json: AsJson, run: Run) -> None:
    record = saved / "commits" / casckpt.open(saved).get("a@2").commit.txid
    record.chmod(0o644)
    os.truncate(record, 100)
    assert [one["key"] for one in as_json("repair", saved, status=4)["records"]] == [f"commits/{record.name}"]
    said = run("repair", saved, status=4).output
    assert f"not repaired: record commits/{record.name}: " in said
    assert "put the files back from a copy of the files" in said


def test_repair_from_a_missing_store_is_not_found(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    assert as_json("repair", saved, "--from", tmp_path / "nope", status=3)["error"]["kind"] == "not-found"
