from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.repository import blob_cache
from tests.cli.conftest import AsJson, Run


def test_the_caches_of_this_host_are_shown_and_cleared(
    tmp_path: Path, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_cache, "MEMORY", tmp_path)
    state = {"w": torch.arange(10_000)}
    store = casckpt.open(tmp_path / "store", cache_saves=True)
    store.save(state, step=1)
    disk = tmp_path / "disk"
    casckpt.open(tmp_path / "store", cache_dir=disk).pre_download("latest")
    shown = as_json("cache", disk)
    assert [row["folder"] for row in shown] == [str(disk), str(store.repository.blob_cache.root)]
    assert [row["blobs"] for row in shown] == [1, 1]
    assert shown[0]["bytes"] == shown[1]["bytes"] > 80_000
    assert str(disk) in run("cache", disk).stdout
    assert as_json("cache", disk, "--clear") == shown
    assert [row["bytes"] for row in as_json("cache", disk)] == [0, 0]
    assert store.read("latest")["w"].equal(state["w"])


def test_a_cache_that_cannot_be_read_is_reported(
    tmp_path: Path, as_json: AsJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_cache, "MEMORY", tmp_path)
    (tmp_path / "blobs").write_text("a file where a folder should be")
    assert as_json("cache", tmp_path, status=1)["error"]["kind"] == "storage"
