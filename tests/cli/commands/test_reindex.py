from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import AsJson, Run


def test_reindex_rebuilds_the_catalogue(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    found = as_json("reindex", saved, "--cache-dir", tmp_path / "cache")
    assert found["checkpoints"] == 4
    assert Path(found["path"]).is_relative_to(tmp_path / "cache")
    assert Path(found["path"]).is_file()


def test_reindex_fails_without_a_place_for_the_catalogue(saved: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    said = run("reindex", saved, "--cache-dir", tmp_path / "file" / "below", status=1).stderr
    assert "catalogue.sqlite cannot be written" in said.splitlines()[-1]
