from __future__ import annotations

from datetime import datetime
from pathlib import Path

import torch

import casckpt
from casckpt.base.units import format_size
from tests.cli.conftest import AsJson, Run


def test_stats_show_when_the_disk_is_full(saved: Path, as_json: AsJson, run: Run) -> None:
    found = as_json("stats", saved, "--plan")
    assert {*found} - {*as_json("stats", saved)} == {"bytes_per_day", "bytes_free", "full_at"}
    assert found["bytes_free"] > 0
    assert as_json("stats", saved, "--plan", "--run", "b")["bytes_per_day"] <= found["bytes_per_day"]
    assert as_json("stats", saved, "--run", "b", status=2)["error"]["message"] == "--run applies to --plan"
    text = run("stats", saved, "--plan").stdout
    assert "grows by" in text
    assert " per day, " in text


def test_stats_count_checkpoints_and_bytes(saved: Path, as_json: AsJson) -> None:
    found = as_json("stats", saved)
    blobs = list(saved.glob("objects/*/*.safetensors"))
    files = [*blobs, *saved.glob("objects/*/*.manifest")]
    assert (found["checkpoints"], found["blobs"]) == (4, len(blobs))
    assert found["bytes_stored"] == sum(path.stat().st_size for path in files)
    assert found["bytes_logical"] == 3 * 24_000 + 20_012


def test_stats_show_the_effect_of_compression(
    store: casckpt.Store, store_path: Path, as_json: AsJson, run: Run
) -> None:
    weights = torch.linspace(1, 2, 8192, dtype=torch.bfloat16)
    store.save({"w": weights}, run="r", step=1)
    assert "smaller" not in run("stats", store_path).stdout + run("show", store_path, "r@1").stdout
    store.save({"w": weights + 0.5}, run="r", step=2, compress="always")
    found, shown = as_json("stats", store_path), as_json("show", store_path, "r@2")["stats"]
    for told in (found, shown):
        assert told["bytes_coded"] == weights.nbytes
        assert 0 < told["bytes_deltas"] <= told["bytes_frames"] < weights.nbytes
    line = f"16.0 KiB in {format_size(found['bytes_frames'])}, including {format_size(found['bytes_deltas'])} of deltas"
    assert all(line in run(*args).stdout for args in (("stats", store_path), ("show", store_path, "r@2")))
    assert as_json("verify", store_path, "--decode")["decoded_bytes"] > weights.nbytes
    assert "decoded 32.0 KiB" in run("verify", store_path, "--decode").stdout


def test_report_shows_what_uses_the_space(saved: Path, as_json: AsJson, run: Run) -> None:
    found = as_json("report", saved)
    first, second = found["runs"]
    assert (first["run"], first["checkpoints"], first["newest_step"]) == ("a", 3, 3)
    assert (second["run"], second["checkpoints"]) == ("b", 1)
    assert datetime.fromisoformat(first["newest_at"]).tzinfo is not None
    assert first["bytes_alone"] + second["bytes_alone"] + found["bytes_shared"] == found["bytes_blobs"]
    assert found["bytes_blobs"] == sum(path.stat().st_size for path in saved.glob("objects/*/*.safetensors"))
    lines = run("report", saved).stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["RUN", "a", "b"]
