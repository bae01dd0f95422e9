"""Which file systems have reliable listings, and which have a cheap page cache."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from casckpt.errors import Unsupported
from casckpt.storage.local.store import LocalStore, caches_well, mount_point, stale_listings
from tests.support.gcs import collect
from tests.support.repositories import repository

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
server:/data /data nfs4 rw,vers=4.2 0 0
server:/sure /data/sure nfs4 rw,noac 0 0
server:/odd /data/with\\040space nfs rw,actimeo=0 0 0
server:/old /data2 nfs rw,acdirmax=60 0 0
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mounts"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("path", "stale"),
    [
        ("/srv/me", False),
        ("/data", True),
        ("/data/runs/ckpts", True),
        ("/data/sure/ckpts", False),
        ("/data/with space/x", False),
        ("/data2/x", True),
        ("/data20", False),
    ],
)
def test_only_nfs_with_cached_attributes_counts_as_having_stale_listings(mounts: Path, path: str, stale: bool) -> None:
    assert bool(stale_listings(Path(path), mounts)) is stale


def test_a_folder_whose_mount_is_unknown_does_not_count_as_stale(tmp_path: Path) -> None:
    assert stale_listings(tmp_path, tmp_path / "absent") == ""
    assert LocalStore(tmp_path).traits.stale == ""


@pytest.mark.parametrize(
    ("kind", "warned"),
    [("btrfs", True), ("zfs", True), ("bcachefs", True), ("ext4", False), ("xfs", False), ("tmpfs", False)],
)
def test_file_systems_that_need_space_to_overwrite_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, warned: bool
) -> None:
    (table := tmp_path / "mounts").write_text(f"a / btrfs rw 0 0\nb {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setattr("casckpt.storage.local.store._MOUNTS", table)
    found = [one for one in LocalStore(tmp_path / "store").examine() if one.name == "full"]
    assert [(one.ok, kind in one.found, "quota" in one.advice) for one in found] == [(None, True, True)] * warned


def test_gc_rejects_stale_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "casckpt.storage.local.store.stale_listings", lambda path: f"{path} is on NFS; mount it with noac"
    )
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    with pytest.raises(Unsupported, match="mount it with noac"):
        collect(repo)


@pytest.mark.parametrize(
    ("path", "release", "well"),
    [
        ("/srv", "6.16.0-arch1", True),
        ("/srv", "7.0", True),
        ("/srv", "6.8.0-45-generic", False),
        ("/journal/x", "6.18.44", False),
        ("/data", "6.18.44", False),
        ("/srv", "unknown", False),
    ],
)
def test_the_page_cache_is_used_on_mounts_with_large_reads(
    mounts: Path, path: str, release: str, well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    mounts.write_text(MOUNTS + "/dev/vdb /journal ext4 rw,data=journal 0 0\n")
    assert caches_well(Path(path), mounts) is well
    assert not caches_well(Path(path), mounts / "none")


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/srv/me", ""),
        ("/data/runs/ckpts", "/data"),
        ("/data/sure", "/data/sure"),
        ("/data/with space/x", "/data/with space"),
        ("/auto/x", ""),
        ("/auto/disk/x", "/auto/disk"),
    ],
)
def test_a_mount_point_is_the_deepest_above_a_path_except_the_root_and_an_automounters_trigger(
    mounts: Path, path: str, mount: str
) -> None:
    mounts.write_text(MOUNTS + "systemd-1 /auto autofs rw 0 0\n/dev/vdc /auto/disk xfs rw 0 0\n")
    assert mount_point(path, mounts) == mount
    assert mount_point(path, mounts / "none") == ""
