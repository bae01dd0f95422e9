"""Bucket URLs and their options. Secrets are never shown."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import InvalidInput, Unsupported
from casckpt.storage import open_storage


def test_a_url_always_opens_the_same_storage(tmp_path: Path) -> None:
    for url in (str(tmp_path / "s"), "memory://test-open"):
        store = open_storage(url)
        assert open_storage(store.url).url == store.url


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https", "nonsense"])
def test_credentials_in_a_url_are_rejected_and_not_shown(scheme: str) -> None:
    with pytest.raises(InvalidInput, match=f"{scheme}://") as caught:
        open_storage(f"{scheme}://user:secret@bucket/prefix")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "sftp", "github"])
def test_an_fsspec_protocol_is_opened_without_a_request(scheme: str) -> None:
    assert open_storage(f"{scheme}://bucket/a/b/").url == f"{scheme}://bucket/a/b"


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_bucket_name_that_is_too_short_is_rejected(scheme: str) -> None:
    with pytest.raises(InvalidInput, match=f"{scheme}://b/x: the bucket name 'b' is too short"):
        open_storage(f"{scheme}://b/x")


@pytest.mark.parametrize(("scheme", "package"), [("gs", "'casckpt[gcs]'"), ("az", "'casckpt[azure]'")])
def test_the_error_for_a_missing_package_names_it(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=re.escape(f"pip install {package}")):
        open_storage(f"{scheme}://bucket/prefix")


def test_a_store_on_a_web_server_is_refused_and_a_copy_of_its_folder_opens(tmp_path: Path) -> None:
    saved = casckpt.open(tmp_path / "store").save({"x": 1}, step=1)
    for scheme in ("http", "https"):
        with pytest.raises(Unsupported, match="copy the store's folder to this machine, or mount it, and open that"):
            casckpt.open(f"{scheme}://server/store?token=secret")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    assert casckpt.open(tmp_path / "copy").get("default@1").id == saved.id


def test_an_unknown_scheme_is_rejected() -> None:
    with pytest.raises(Unsupported, match=r"cannot open nonsense:// URLs.*s3://"):
        open_storage("nonsense://bucket/prefix")


@pytest.mark.parametrize(
    "rest", ["", "/", "/a", "b//a", "b/../a", "b/./a", "b/a?x=1", "b/a#x", "file::s3", "-b/a", "b\\a", "b/a\n"]
)
def test_invalid_bucket_urls_are_rejected(rest: str) -> None:
    with pytest.raises(InvalidInput, match="s3://"):
        open_storage(f"s3://{rest}")


def test_secrets_in_storage_options_are_never_shown() -> None:
    store = open_storage("s3://bucket/prefix", {"key": "AKIAEXAMPLE", "secret": "hidden"})
    shown = f"{store!r} {store.url} {vars(store)!r}"
    assert "hidden" not in shown
    assert "AKIAEXAMPLE" not in shown


def test_options_for_a_folder_are_rejected(tmp_path: Path) -> None:
    assert open_storage(tmp_path, storage_options={}).url == str(tmp_path)
    for url in (str(tmp_path), tmp_path.as_uri(), "memory://x"):
        with pytest.raises(InvalidInput, match="anon"):
            open_storage(url, storage_options={"anon": True})


@pytest.mark.parametrize("url", ["s3://bucket/store", "folder"])
def test_options_that_are_not_a_dict_are_rejected(url: str) -> None:
    options: Any = ["secret"]
    with pytest.raises(InvalidInput, match="must be a dict") as caught:
        open_storage(url, options)
    assert "secret" not in str(caught.value)
