"""Paths and URLs that specify storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import InvalidInput
from casckpt.storage import open_storage


def test_paths_and_file_urls_are_resolved_to_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_storage("a/b").url == str(tmp_path / "a/b")
    assert open_storage(Path("a")).url == str(tmp_path / "a")
    assert open_storage("~/a").url == str(tmp_path / "home/a")
    assert open_storage(str(tmp_path)).url == str(tmp_path)
    assert open_storage(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    assert open_storage(f"FILE://localhost{tmp_path}").url == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket", "memory://x", "file:///x"])
def test_a_path_object_created_from_a_url_is_rejected(url: str) -> None:
    """pathlib removes a slash, so a job would silently save into the folder ``s3:`` instead of a bucket."""
    for path in (Path(url), str(Path(url))):
        with pytest.raises(InvalidInput, match="lost a slash"):
            open_storage(path)


@pytest.mark.parametrize("name", ["./s3:/x", "runs:/x", "a/s3:/x", "s3:x", "c:/x"])
def test_folder_names_can_contain_colons(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage(name).url == str(tmp_path / name)


def test_memory_urls_are_opened() -> None:
    assert open_storage("memory://test-open").url == "memory://test-open"


@pytest.mark.parametrize("url", ["", "file://", "file://relative/path", "a\0b", "file:///a%00b", 5, None, b"a"])
def test_invalid_locations_are_rejected(url: Any) -> None:
    with pytest.raises(InvalidInput):
        open_storage(url)
