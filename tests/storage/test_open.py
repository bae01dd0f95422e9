"""What names a storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import InvalidInput, Unsupported
from casckpt.storage import open_storage


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_storage("a/b").url == str(tmp_path / "a/b")
    assert open_storage(Path("a")).url == str(tmp_path / "a")
    assert open_storage("~/a").url == str(tmp_path / "home/a")
    assert open_storage(str(tmp_path)).url == str(tmp_path)
    assert open_storage(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    assert open_storage(f"FILE://localhost{tmp_path}").url == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_path_object_is_never_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage(Path("memory://x")).url == str(tmp_path / "memory:/x")


def test_memory() -> None:
    assert open_storage("memory://test-open").url == "memory://test-open"


def test_a_url_opens_the_same_store(tmp_path: Path) -> None:
    for url in (str(tmp_path / "s"), "memory://test-open"):
        store = open_storage(url)
        assert open_storage(store.url).url == store.url


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https", "nonsense"])
def test_other_schemes(scheme: str) -> None:
    with pytest.raises(Unsupported, match=f"{scheme}://") as caught:
        open_storage(f"{scheme}://user:secret@bucket/prefix")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "file://", "file://relative/path", "a\0b", "file:///a%00b", 5, None, b"a"])
def test_nonsense(url: Any) -> None:
    with pytest.raises(InvalidInput):
        open_storage(url)


def test_options_are_for_remote_storages(tmp_path: Path) -> None:
    assert open_storage(tmp_path, storage_options={}).url == str(tmp_path)
    for url in (str(tmp_path), tmp_path.as_uri(), "memory://x"):
        with pytest.raises(InvalidInput, match="anon"):
            open_storage(url, storage_options={"anon": True})
