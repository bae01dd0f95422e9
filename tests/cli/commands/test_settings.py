"""``casckpt settings`` shows and changes the settings of a store."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput, NotFound
from casckpt.repository import blob_cache
from tests.cli.conftest import AsJson, Run

UNSET = {
    "min_age": None, "min_age_ephemeral": None, "revoke_after": None, "mirror": None, "mirror_thinned": None,
    "compress": None,
}  # fmt: skip


def test_changing_a_setting_applies_to_all_users_and_leaves_other_settings_unchanged(
    saved: Path, as_json: AsJson, run: Run
) -> None:
    assert as_json("settings", saved) == UNSET
    changed = as_json("settings", saved, "--set", "min_age=3d", "--set", "revoke_after=90s")
    assert changed == UNSET | {"min_age": 3 * 86400.0, "revoke_after": 90.0}
    assert as_json("settings", saved, "--unset", "min_age", "--set", "revoke_after=0") == UNSET | {"revoke_after": 0.0}
    lines = run("settings", saved, "--set", "min_age=36h").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["min_age", "36h"], ["min_age_ephemeral", "15m", "(default)"], ["revoke_after", "0"],
        ["mirror", "none", "(default)"], ["mirror_thinned", "no", "(default)"], ["compress", "off", "(default)"],
    ]  # fmt: skip


def test_gc_follows_the_settings(saved: Path, as_json: AsJson, run: Run) -> None:
    run("settings", saved, "--set", "min_age=0")
    run("forget", saved, "a@1")
    assert [one["step"] for one in as_json("gc", saved)["purged"]] == [1]


def test_a_mirror_is_stored_as_a_full_url(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    there = casckpt.open(tmp_path / "there")
    assert as_json("settings", saved, "--set", f"mirror={tmp_path / 'there'}")["mirror"] == there.url
    assert as_json("status", saved)["mirror"] == there.url
    assert as_json("settings", saved, "--unset", "mirror")["mirror"] is None
    as_json("settings", saved, "--set", f"mirror={tmp_path / 'there'}")
    assert as_json("settings", saved, "--set", "mirror=none")["mirror"] is None  # as `settings` shows it


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--set", "colour=red"], 1, "no setting 'colour': use one of min_age, min_age_ephemeral"),
        (["--unset", "exclusive_create"], 1, "no setting 'exclusive_create'"),
        (["--set", "min_age=3"], 1, "min_age: '3' is not a duration"),
        (["--set", "revoke_after=-1s"], 1, "revoke_after: '-1s' is not a duration"),
        (["--set", "compress=zstd"], 1, "pass 'auto', 'off' or 'always'"),
        (["--set", "min_age"], 2, "'min_age' does not have the form NAME=VALUE"),
        (["--set", "min_age="], 2, "'min_age=' does not have the form NAME=VALUE"),
        (["--set", "min_age=1d", "--unset", "min_age"], 2, "both name min_age"),
    ],
)
def test_an_invalid_setting_is_named_and_changes_nothing(
    saved: Path, as_json: AsJson, options: list[str], status: int, says: str
) -> None:
    assert says in as_json("settings", saved, *options, status=status)["error"]["message"]
    assert as_json("settings", saved) == UNSET


def test_a_store_cannot_be_its_own_mirror(saved: Path, as_json: AsJson) -> None:
    for place in (saved, saved / "mirror"):
        error = as_json("settings", saved, "--set", f"mirror={place}", status=1)["error"]
        assert "inside the store's own folder" in error["message"]


def test_store_methods_change_settings_as_the_command_does(saved: Path) -> None:
    store = casckpt.open(saved)
    assert store.change_settings(min_age=timedelta(days=2), min_age_ephemeral="1h") == store.settings
    assert casckpt.open(saved).settings.min_age == timedelta(days=2)
    store.change_settings(min_age=None)
    assert (store.settings.min_age, store.settings.min_age_ephemeral) == (None, timedelta(hours=1))
    with pytest.raises(InvalidInput, match="created_at"):
        store.change_settings(created_at=1)  # type: ignore[call-arg]


def test_settings_of_a_missing_store_raise_not_found(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "none")
    with pytest.raises(NotFound):
        _ = store.settings
    with pytest.raises(NotFound):
        store.change_settings(min_age="1d")


def test_init_creates_a_store_with_the_given_sizes_only_once(store_path: Path, as_json: AsJson, run: Run) -> None:
    made = as_json("init", store_path, "--cell-size", "64KiB", "--blob-size", "4MiB")
    assert (made["cell_bytes"], made["blob_bytes"]) == (64 << 10, 4 << 20)
    assert casckpt.open(store_path).repository.marker.store_id == made["store_id"]
    assert as_json("init", store_path, status=5)["error"]["kind"] == "conflict"
    assert "not a size" in run("init", store_path, "--cell-size", "big", status=2).stderr


def test_reindex_rebuilds_the_catalogue(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    found = as_json("reindex", saved, "--cache-dir", tmp_path / "cache")
    assert found["checkpoints"] == 4
    assert Path(found["path"]).is_relative_to(tmp_path / "cache")
    assert Path(found["path"]).is_file()


def test_reindex_fails_without_a_location_for_the_catalogue(saved: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    said = run("reindex", saved, "--cache-dir", tmp_path / "file" / "below", status=1).stderr
    assert "casckpt cannot write" in said.splitlines()[-1]


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
