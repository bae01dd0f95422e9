"""The status of a store: what needs attention is named, nothing else is, and no blob is read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from casckpt.base.units import time_of
from casckpt.contents import blobs
from casckpt.errors import NotFound
from casckpt.format.keys import blob_key, commit_key, manifest_key, tag_key
from casckpt.format.names import BlobHash
from casckpt.history import commits
from casckpt.history.commits import Commit, list_commits
from casckpt.history.leases import take
from casckpt.history.tags import set_tag
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from casckpt.upkeep.repair.verify import verify
from casckpt.upkeep.status import status
from tests.support.checkpoints import array, save_arrays
from tests.support.far import FarStore
from tests.support.faulty import FaultyStore, call_first, corrupt
from tests.support.gcs import begin_elsewhere, keys, run_gc
from tests.support.repositories import START, blob_hash, meanwhile, memory, repository, save


@pytest.fixture(params=["near", "far"])
def faults(request: pytest.FixtureRequest) -> FaultyStore:
    """The storage of ``repo``, in both kinds: only a near one is read anew."""
    return FaultyStore(memory() if request.param == "near" else FarStore(memory()))


def damaged(repo: Repository) -> list[tuple[str, str]]:
    return [*status(repo).damaged]


def filled(repo: Repository) -> Commit:
    """Save a@1 and a@2, and let this host see all of it. Return a@1."""
    one = save(repo, "a", 1, texts=["one", "both"])
    save(repo, "a", 2, texts=["two"])
    run_gc(repo)
    assert damaged(repo) == []
    return one


def blob_of(commit: Commit) -> str:
    return blob_key(commit.txid, blob_hash("one"))


def manifest_of(commit: Commit) -> str:
    return manifest_key(commit.txid, commit.id)


def cut(key: Callable[[Commit], str]) -> Callable[[Repository, Commit], None]:
    """Return a harm that shortens an object."""

    def harm(repo: Repository, commit: Commit) -> None:
        data = repo.storage.get(key(commit), limit=1 << 20)
        repo.storage.replace(key(commit), data[:-1])

    return harm


def mark(repo: Repository, commit: Commit) -> None:
    blobs.mark_damaged(repo, commit.txid, BlobHash(blob_hash("one")), "its disk failed")


def lose_tag(repo: Repository, commit: Commit) -> None:
    set_tag(repo, "best", commit)
    repo.storage.delete(tag_key("best", 0))


HARMS: dict[str, tuple[Callable[[Repository, Commit], object], Callable[[Commit], str], str]] = {
    "blob is missing": (lambda repo, one: repo.storage.delete(blob_of(one)), blob_of, "it is gone (needed by a@1"),
    "blob is truncated": (cut(blob_of), blob_of, "bytes instead of"),
    "blob is marked": (mark, blob_of, "its disk failed (needed by a@1"),
    "manifest is missing": (lambda repo, one: repo.storage.delete(manifest_of(one)), manifest_of, "is missing"),
    "manifest is truncated": (cut(manifest_of), manifest_of, "is damaged"),
    "record is missing": (
        lambda repo, one: repo.storage.delete(commit_key(one.txid)), lambda one: commit_key(one.txid), "it is missing",
    ),
    "tag is missing": (
        lose_tag, lambda one: "tags/best", "is missing, although it was set",
    ),
}  # fmt: skip


@pytest.mark.parametrize("host", ["same host", "another host"])
@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_named(repo: Repository, tmp_path: Path, harm: str, host: str) -> None:
    one = filled(repo)
    do, key, why = HARMS[harm]
    do(repo, one)
    looking = repo if host == "same host" else repository(tmp_path / "other", repo.storage, seed=2)
    found = [(key, why) for key, why in damaged(looking) if not key.startswith("runs/")]
    assert [one for one, _ in found] == [key(one)]
    assert why in found[0][1]


@pytest.mark.parametrize("what", ["manifest", "commit", "tag"])
def test_where_reading_is_cheap_changed_bytes_of_manifests_and_records_are_named(tmp_path: Path, what: str) -> None:
    """No listing shows that a disk changed them, and this host has read them before."""
    faults = FaultyStore(memory())
    repo = repository(tmp_path, faults)
    one = filled(repo)
    set_tag(repo, "best", one)
    assert damaged(repo) == []
    keys = {"manifest": manifest_of(one), "commit": commit_key(one.txid), "tag": tag_key("best", 0)}
    faults.inject(corrupt("get", key=keys[what]))
    assert keys[what].removesuffix("/0") in [key for key, _ in damaged(repo)]


@pytest.mark.parametrize("folder", ["objects/", "commits/"])
def test_what_is_saved_meanwhile_is_not_damaged(repo: Repository, faults: FaultyStore, folder: str) -> None:
    filled(repo)

    def add() -> None:
        faults.heal()
        save(repo, "a", 3, texts=["three"])

    faults.inject(call_first("list", meanwhile(add), key=folder))
    assert damaged(repo) == []


def test_no_blob_is_read_and_nothing_is_written(repo: Repository, faults: FaultyStore) -> None:
    one = filled(repo)
    repo.storage.delete(blob_of(one))
    mark(repo, one)
    faults.calls.clear()
    assert damaged(repo)
    assert [call for call in faults.calls if call.method != "list" and call.key.endswith(".safetensors")] == []
    assert {call.method for call in faults.calls} <= {"list", "list_folder", "get", "open", "size"}


@pytest.mark.parametrize("host", ["same host", "another host"])
def test_what_a_gc_deletes_meanwhile_is_not_damaged(
    repo: Repository, faults: FaultyStore, tmp_path: Path, host: str
) -> None:
    other = repository(tmp_path / "other", faults, seed=2, clock=repo.clock)
    commits.forget(repo, filled(repo))

    def delete() -> None:
        faults.heal()
        assert run_gc(other if host == "same host" else repo).deleted_blobs == 2

    faults.inject(call_first("list", meanwhile(delete), key="objects/"))
    assert damaged(repo if host == "same host" else other) == []


def test_the_last_gc_says_who_ran_it_and_what_it_left(repo: Repository) -> None:
    assert status(repo).gc is None
    one = filled(repo)
    commits.forget(repo, one)
    repo.user = "ann"
    run_gc(repo, min_age=None)
    gc = status(repo).gc
    assert gc is not None
    assert (gc.who, gc.waiting, gc.refused, gc.opened) == (repo.who, 1, 0, 0)
    assert timedelta(0) < status(repo).at - gc.at < timedelta(seconds=9)


def test_settings_that_cannot_be_read_are_damage(repo: Repository) -> None:
    filled(repo)
    repo.change_settings(min_age_seconds=100.0)
    repo.change_settings(min_age_seconds=10.0)
    (first, *_) = sorted(entry.key for entry in repo.storage.list("settings/"))
    repo.storage.replace(first, b"")
    assert [one.key for one in status(repo).damaged] == [first]
    assert [one.key for one in verify(repo).records] == [first]


def test_a_damaged_note_of_the_last_gc_hides_nothing_else(repo: Repository) -> None:
    filled(repo)
    run_gc(repo)
    (note,) = repo.storage.list("ran/")
    repo.storage.replace(note.key, b"")
    found = status(repo)
    assert found.gc is None
    assert [one.why.endswith("The next gc replaces it") for one in found.damaged] == [True]
    run_gc(repo)
    assert status(repo).damaged == []


def test_saves_in_progress_and_the_oldest_tag_are_shown(repo: Repository) -> None:
    assert status(repo).oldest_tag is None
    one = filled(repo)
    take(repo, one, 60.0)
    begun = begin_elsewhere(repo)
    repo.user = "ann"
    for name in ("newer", "best"):
        set_tag(repo, name, one)
    set_tag(repo, "newer", list_commits(repo).live()[1])  # now it is newer
    found = status(repo)
    assert [(save.txid, save.run, save.step, save.host) for save in found.saves] == [(begun, "other", 7, "gpu7")]
    assert found.oldest_tag is not None
    assert (found.oldest_tag.name, found.oldest_tag.checkpoint) == ("best", list_commits(repo).of_id(one.id))
    assert found.oldest_tag.holder.startswith("ann@")
    assert time_of(START) < found.oldest_tag.set_at < found.at


def test_what_the_mirror_lacks_is_shown_with_its_oldest_time(tmp_path: Path) -> None:
    here, away = Store(repository(tmp_path, LocalStore(tmp_path / "here"))), tmp_path / "away"
    one, two = (save_arrays(here.repository, {"w": array(step)}, step=step) for step in (1, 2))
    assert (here.status().mirror, here.status().unmirrored_since) == (None, None)
    here.change_settings(mirror=away)
    found = here.status()
    assert [commit.id for commit in found.unmirrored] == [one.id, two.id]
    assert "there is no store at the mirror" in found.mirror_problem
    assert found.unmirrored_since == time_of(one.committed.time)
    here.copy_to(away, one.id)
    found = here.status()
    assert ([commit.id for commit in found.unmirrored], found.mirror_problem) == ([two.id], "")
    assert found.unmirrored_since == time_of(two.committed.time)
    here.copy_to(away)
    assert (here.status().unmirrored, here.status().unmirrored_since) == ([], None)


def test_the_bytes_on_the_disk_are_divided_by_run_and_by_user(tmp_path: Path) -> None:
    root = tmp_path / "store"
    repo = repository(tmp_path, LocalStore(root))
    for user, run in (("ann", "a"), ("bob", "b"), ("ann", "b")):
        repo.user = user
        save(repo, run, len(keys(repo)), texts=[f"{user} {run}" * 5000])
    begin_elsewhere(repo, "c")
    found = status(repo)
    files = [path for path in root.glob("*/**/*") if path.is_file() and ".spare" not in path.parts]
    allocated = {path: 512 * path.stat().st_blocks for path in files}
    assert found.bytes_on_disk == sum(allocated.values()) > sum(path.stat().st_size for path in files)
    assert sum(found.by_run.values()) == sum(found.by_user.values()) == found.bytes_on_disk
    assert [*found.by_run] == ["b", "a", ""]
    of_a = {commit.txid for commit in list_commits(repo).live() if commit.run == "a"}
    wrote = sum(size for path, size in allocated.items() if any(txid in str(path) for txid in of_a))
    assert found.by_user["bob"] == wrote < found.by_run["a"]  # whose announcements count, too
    assert [*found.by_user] == ["ann", "bob", ""]
    assert found.bytes_free is not None


def test_the_bytes_of_a_purged_run_count_for_it_until_a_gc_deletes_them(repo: Repository) -> None:
    one = save(repo, "gone", 1, texts=["x" * 9000])
    save(repo, "b", 1)
    before = status(repo).by_run["gone"]
    commits.purge(repo, commits.forget(repo, one))
    assert status(repo).by_run["gone"] > before
    run_gc(repo)
    assert status(repo).by_run["gone"] < before - 9000


def test_a_missing_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no store"):
        status(Repository(LocalStore(tmp_path / "none"), tmp_path / "cache"))
