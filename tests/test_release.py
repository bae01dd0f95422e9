"""``tools/release`` refuses what it would otherwise notice, or lose, only at its end."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripts import run_script

RELEASE = Path(__file__).parents[1] / "tools" / "_release.py"


def test_a_folder_with_other_files_is_not_emptied(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (tmp_path / "casckpt-0.3.0.tar.gz").write_text("")
    done = run_script(RELEASE, "--out", tmp_path)
    assert done.status == 1
    assert f"{tmp_path} holds mine.txt, and would be emptied" in done.told
    assert mine.exists()


def test_a_key_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    done = run_script(RELEASE, "--key", tmp_path / "none.pem")
    assert done.status == 2
    assert "none.pem is not a file" in done.told
