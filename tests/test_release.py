"""``tools/release`` refuses what it would otherwise notice, or lose, only at its end."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from _release import PAGES, why_not_said
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "tools" / "_release.py"


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


def test_a_release_must_be_what_the_pages_say() -> None:
    texts = {page: form % "1.2.0" for page, form in PAGES.items()}
    assert why_not_said(Version("1.2.0"), texts) == ""
    assert why_not_said(Version("1.2.1"), texts) == (
        "README.md does not say 'version = {1.2.1}': correct it, commit, and git tag --force --sign v1.2.1"
    )
    texts["docs/index.md"] += "It is not on PyPI yet."
    assert why_not_said(Version("1.2.0"), texts) == (
        "docs/index.md says 'not on PyPI yet': describe the installation from PyPI, "
        "commit, and git tag --force --sign v1.2.0"
    )


def test_the_pages_name_a_version() -> None:
    for page, form in PAGES.items():
        assert re.search(re.escape(form) % r"\d+\.\d+\.\d+", (ROOT / page).read_text()), page
