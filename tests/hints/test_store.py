"""Advice about stores, their contents, and names in them."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import subprocess
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import (
    CasckptError,
    Damaged,
    Gone,
    InvalidInput,
    Mismatch,
    MissingKey,
    NotFound,
    StorageError,
    Unsigned,
    Unsupported,
)
from casckpt.frontends.follow import Follower
from casckpt.frontends.trainer import Checkpointer
from casckpt.repository import catalogue, repository
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.tensors import staging
from tests.hints.conftest import Run, changed_blob, words
from tests.repository.test_exclusive import Ignoring
from tests.support.far import FarStore, far
from tests.support.hints import Messages, follows
from tests.support.local import without_links
from tests.support.signing import pair

Store = casckpt.Store


# opening


@follows("store/store.py:Store.__init__", "open the store with casckpt.open")
def test_a_store_can_be_opened_with_open_as_advised(store_path: Path, messages: Messages) -> None:
    with messages.error((InvalidInput, TypeError)) as advice:
        Store(str(store_path))  # type: ignore[arg-type]
    assert advice.says(f"casckpt.open({str(store_path)!r})")
    casckpt.open(store_path).save({"x": 1}, run="a", step=1)


@follows("store/store.py:Store._its_mirror", "use casckpt.open(..., mirror=URL)")
def test_a_mirror_can_be_passed_when_a_store_is_opened(
    saved: Store, store_path: Path, tmp_path: Path, messages: Messages
) -> None:
    with messages.error(InvalidInput) as advice:
        saved.mirror_lag()
    advice.says("mirror=URL")
    mirrored = casckpt.open(store_path, mirror=tmp_path / "mirror")
    mirrored.wait_for_mirror()
    assert mirrored.mirror_lag().checkpoints == 0
    assert [str(one) for one in casckpt.open(tmp_path / "mirror").checkpoints()] == [str(saved.get("a@1"))]


@follows("repository/repository.py:Repository._read_marker", "create it with a save or `casckpt init`")
def test_a_missing_store_can_be_created_as_advised(
    store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    with messages.error(NotFound) as advice:
        casckpt.open(store_path).checkpoints()
    run(*advice.command("init"), store_path)
    assert casckpt.open(store_path).checkpoints() == []
    casckpt.open(tmp_path / "other").save({"x": 1}, run="a", step=1)
    assert len(casckpt.open(tmp_path / "other").checkpoints()) == 1


@follows("repository/repository.py:Repository._is_free", "To start a new store, leave this out")
def test_a_new_store_can_be_made_without_the_setting_that_requires_one(store_path: Path, messages: Messages) -> None:
    with messages.error(NotFound) as advice:
        casckpt.open(store_path, create=False).save({"x": 1}, run="a", step=1)
    assert advice.says("create=False")
    casckpt.open(store_path).save({"x": 1}, run="a", step=1)
    assert len(casckpt.open(store_path, create=False).checkpoints()) == 1


@follows("repository/repository.py:Repository._is_free", "=1 once (or pass create=True)")
def test_a_missing_mount_comes_back_or_a_new_store_is_made_on_the_disk_below(
    saved: Store, store_path: Path, tmp_path: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = {"now": str(store_path.parent)}
    for module in (catalogue, repository):
        monkeypatch.setattr(module, "mount_point", lambda path: mounted["now"])
    assert casckpt.open(store_path).checkpoints()
    store_path.rename(tmp_path / "disk")
    mounted["now"] = ""
    with messages.error(NotFound) as advice:
        casckpt.open(store_path).save({"x": 1}, run="a", step=2)
    (tmp_path / "disk").rename(store_path)
    assert [one.step for one in casckpt.open(store_path).checkpoints()] == [1], "after a mount, all is there"
    monkeypatch.undo()
    monkeypatch.setenv("CASCKPT_CREATE", "1")
    shutil.rmtree(store_path)
    assert advice.says("CASCKPT_CREATE=1")
    casckpt.open(store_path).save({"x": 1}, run="a", step=2)
    assert [one.step for one in casckpt.open(store_path).checkpoints()] == [2]


@follows("upkeep/doctor.py:_reads", "run `casckpt verify`")
def test_verify_names_the_record_that_doctor_cannot_read(saved: Store, store_path: Path, run: Run) -> None:
    (record,) = (store_path / "commits").iterdir()
    record.chmod(0o600)
    record.write_bytes(b"?")
    (found,) = (one for one in saved.doctor() if one.name == "store")
    assert (found.ok, found.advice) == (False, "run `casckpt verify`")
    assert record.name in run("verify", store_path, status=4).stdout


def test_a_store_of_links_can_be_copied_as_doctor_advises(saved: Store, store_path: Path, tmp_path: Path) -> None:
    for path in [path for path in store_path.rglob("*") if path.is_file()]:
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    (found,) = (one for one in casckpt.open(store_path).doctor() if one.name == "links")
    command = found.advice.partition("`")[2].strip("`").replace("COPY", str(tmp_path / "copy"))
    subprocess.run(command.split(), check=True)
    copy = casckpt.open(tmp_path / "copy")
    assert (len(copy.checkpoints()), copy.verify().is_damaged) == (1, False)


@follows("repository/repository.py:Repository.change_settings", "see `casckpt settings --help`")
def test_the_suggested_help_lists_the_names_of_settings(saved: Store, messages: Messages, run: Run) -> None:
    with messages.error(InvalidInput) as advice:
        saved.repository.change_settings(least_age=3)
    assert "min_age" in run(*advice.command("settings")).output
    saved.change_settings(min_age="2d")
    assert saved.settings.min_age == timedelta(days=2)


@follows("repository/exclusive.py:require_exclusive", "Use a different storage, or pass single_writer")
def test_storage_that_replaces_objects_can_be_used_by_a_single_writer(tmp_path: Path, messages: Messages) -> None:
    storage = Ignoring()
    with messages.error(Unsupported) as advice:
        Store(Repository(storage, tmp_path / "cache")).save({"x": 1}, run="a", step=1)
    alone: Any = {advice.says("single_writer"): True}
    store = Store(Repository(storage, tmp_path / "cache", **alone))
    store.save({"x": 1}, run="a", step=1)
    assert store.read("a@1") == {"x": 1}
    casckpt.open(tmp_path, **alone)
    assert advice.says("--single-writer")


@follows("storage/local/newfile.py:FileMaker.create", "or pass single_writer=True (--single-writer) if only one job")
def test_a_folder_without_links_can_be_used_by_a_single_writer(
    store_path: Path, messages: Messages, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    with messages.error(Unsupported) as advice:
        casckpt.open(store_path).save({"x": 1}, run="a", step=1)
    alone = casckpt.open(store_path, **advice.argument("single_writer"))
    with Checkpointer(alone, run="a", save_interval=1, max_checkpoints=1, gc=True) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_if_due(step, {"x": torch.tensor(step)})
    assert [one.step for one in alone.checkpoints()] == [3]
    assert "3" in run("list", store_path).output
    run("verify", store_path)
    for command in (("tag", "best", "a@3"), ("gc",)):
        run(command[0], store_path, *command[1:], advice.says("--single-writer"))
    assert alone.get("tag:best").step == 3


# names


@follows("contents/refs.py:_at_step", "was purged: it is gone for good; see `casckpt list`")
def test_the_suggested_list_shows_a_step_to_use_instead_of_a_purged_one(
    saved: Store, purged: casckpt.Checkpoint, messages: Messages, run: Run
) -> None:
    with messages.error(Gone) as advice:
        saved.get(f"{purged.run}@{purged.step}")
    (listed,) = json.loads(run(*advice.command("list"), saved.url, "--json").stdout)
    assert saved.read(listed["id"]) == {"x": 2}


@follows("store/store.py:Store.tag", "the tag name comes first, and then the checkpoint: call tag(…, …)")
def test_the_suggested_call_sets_a_tag(saved: Store, messages: Messages) -> None:
    with messages.error(InvalidInput) as advice:
        saved.tag("a@1", "best")
    eval(advice.says("tag('best', 'a@1')"), {"tag": saved.tag})  # as a reader types it
    assert saved.get("tag:best").step == 1


@follows("store/store.py:Store.restore", "use restore_many for ranges")
def test_restore_many_restores_a_range(saved: Store, messages: Messages) -> None:
    saved.save({"x": 2}, run="a", step=2)
    saved.forget("a@1..2")
    with messages.error(InvalidInput) as advice:
        saved.restore("a@1..2")
    getattr(saved, advice.says("restore_many"))("a@1..2")
    assert [one.step for one in saved.checkpoints()] == [1, 2]


@follows("contents/refs.py:_at_step", "`casckpt restore STORE …` makes it visible again")
def test_the_suggested_command_restores_a_forgotten_step(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    saved.save({"x": 2}, run="a", step=2)
    saved.forget("a@1")
    with messages.error(NotFound) as advice:
        saved.get("a@1")
    run(*advice.command("restore", STORE=store_path))
    assert saved.get("a@1").step == 1


@follows("contents/refs.py:_tagged", "`casckpt restore STORE …` makes it visible again")
def test_a_forgotten_checkpoint_with_a_tag_can_be_restored_as_advised(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    saved.tag("best", "a@1", expires="1d")
    saved.forget("a@1", tagged=True)
    with messages.error(NotFound) as advice:
        saved.get("tag:best")
    run(*advice.command("restore", STORE=store_path))
    assert saved.get("tag:best").step == 1


@follows("history/leases.py:_not_visible", "`casckpt restore STORE …` makes it visible again")
def test_a_forgotten_checkpoint_can_be_leased_after_restore(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    forgotten = saved.get("a@1")
    saved.forget("a@1")
    with messages.error(NotFound) as advice, saved.lease(forgotten):
        pass
    run(*advice.command("restore", STORE=store_path))
    with saved.lease(forgotten) as held:
        assert held.id == forgotten.id


@follows("contents/refs.py:about_run", "forgotten: see `casckpt list --all`")
def test_the_suggested_commands_list_and_restore_a_forgotten_run(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    id = saved.get("a@1").id
    saved.forget("a@1")
    with messages.error(NotFound) as advice:
        saved.get("a@latest")
    output = run(*advice.command("list"), store_path).output
    found = next(word for word in words(output) if id.startswith(word) and len(word) > 6)
    saved.restore(found)
    assert saved.get("a@latest").id == id


@follows("contents/refs.py:_by_id", "see `casckpt list --all`")
def test_the_suggested_list_shows_an_id_to_use_instead_of_a_missing_one(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    with messages.error(NotFound) as advice:
        saved.get("f" * 64 if not saved.get("a@1").id.startswith("f") else "0" * 64)
    output = run(*advice.command("list"), store_path).output
    found = next(word for word in words(output) if saved.get("a@1").id.startswith(word) and len(word) > 6)
    assert saved.get(found).step == 1


@pytest.fixture
def purged(saved: Store) -> casckpt.Checkpoint:
    """Return what was a@1 before a gc purged it. a@2 is visible."""
    saved.save({"x": 2}, run="a", step=2)
    old = saved.get("a@1")
    saved.forget("a@1")
    saved.gc(min_age=0)
    return old


@follows("contents/refs.py:_by_id", "was purged: it is gone for good; see `casckpt list`")
def test_the_suggested_list_shows_an_id_to_use_instead_of_a_purged_one(
    saved: Store, purged: casckpt.Checkpoint, messages: Messages, run: Run
) -> None:
    with messages.error(Gone) as advice:
        saved.get(purged.id)
    (listed,) = json.loads(run(*advice.command("list"), saved.url, "--json").stdout)
    assert saved.read(listed["id"]) == {"x": 2}


@follows("contents/refs.py:_as_it_is", "was purged: it is gone for good; see `casckpt list`")
def test_the_suggested_list_shows_a_checkpoint_to_use_instead_of_a_purged_one(
    saved: Store, purged: casckpt.Checkpoint, messages: Messages, run: Run
) -> None:
    with messages.error(Gone) as advice:
        saved.get(purged)
    (listed,) = json.loads(run(*advice.command("list"), saved.url, "--json").stdout)
    assert saved.read(listed["id"]) == {"x": 2}


@follows("contents/refs.py:_doubt", "commit records cannot be read: see `casckpt verify`")
@follows("cli/commands/list.py:checkpoint_rows", "the record of %s cannot be read; run `casckpt verify` for details")
def test_verify_names_a_commit_record_that_cannot_be_read(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    (record,) = (store_path / "commits").iterdir()
    record.chmod(0o600)
    record.write_bytes(b"not a record")
    with messages.error(NotFound) as advice:
        casckpt.open(store_path).get("a@1")
    assert record.name in run(*advice.command("verify"), store_path, status=4).output
    said = messages.text(run("list", store_path).output)
    assert record.name in run(*said.command("verify"), store_path, status=4).output


# tags


@follows("history/tags.py:no_tag", "there are none; `casckpt tag STORE NAME REF` creates one")
def test_a_missing_tag_can_be_set_as_advised(saved: Store, store_path: Path, messages: Messages, run: Run) -> None:
    with messages.error(NotFound) as advice:
        saved.get("tag:best")
    run(*advice.command("tag", STORE=store_path, NAME="best", REF="a@1"))
    assert saved.get("tag:best").step == 1


@follows("history/tags.py:TagList.raise_damage", "Set the tag again, or delete it (`casckpt tag STORE --delete …`)")
@pytest.mark.parametrize("way", ["set", "delete"])
def test_a_damaged_tag_can_be_set_again_or_deleted_as_advised(
    saved: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    saved.tag("best", "a@1")
    (record,) = (path for path in (store_path / "tags").rglob("*") if path.is_file())
    record.chmod(0o600)
    record.write_bytes(b"not a record")
    opened = casckpt.open(store_path)
    with messages.error(Damaged) as advice:
        opened.forget("a@1")
    if way == "set":
        advice.says("Set the tag again")
        run("tag", store_path, "best", "a@1")
    else:
        run(*advice.command("tag", STORE=store_path))
    assert list(casckpt.open(store_path).tags()) == (["best"] if way == "set" else [])


@follows("history/tags.py:TagList.raise_damage", "End the lease (`casckpt tag STORE --delete …`)")
def test_a_damaged_lease_can_be_ended_as_advised(saved: Store, store_path: Path, messages: Messages, run: Run) -> None:
    with saved.lease("a@1"):
        (record,) = (path for path in (store_path / "leases").rglob("*") if path.is_file())
        record.chmod(0o600)
        record.write_bytes(b"not a record")
        opened = casckpt.open(store_path)
        with messages.error(Damaged) as advice:
            opened.forget("a@1")
        run(*advice.command("tag", STORE=store_path))
        opened.forget("a@1")
        assert opened.checkpoints("a") == []


# manifests, blobs, signatures


@follows(
    "contents/manifests.py:_naming", "Restore it with `casckpt repair`, or give up the checkpoint with `casckpt forget`"
)
def test_a_lost_manifest_can_be_repaired_or_its_checkpoint_purged(
    saved: Store, tmp_path: Path, messages: Messages, run: Run, weights: dict[str, torch.Tensor]
) -> None:
    store_path = tmp_path / "store"
    shutil.copytree(store_path, tmp_path / "copy")
    (manifest,) = store_path.rglob("*.manifest")
    manifest.unlink()
    with messages.error(Damaged) as advice:
        casckpt.open(store_path).read("a@1")
    run(*advice.command("repair"), store_path, "--from", tmp_path / "copy")
    assert torch.equal(casckpt.open(store_path).read("a@1")["w"], weights["w"])

    manifest.unlink()
    run(*advice.command("forget"), store_path, "a@1")
    options = advice.says("--run a --min-age 0").split()
    run("gc", store_path, *options)
    assert "a" not in words(run("list", store_path, "--all").output)


@follows("store/reading.py:pre_download", "Run `casckpt verify`, then `casckpt repair`, on the store")
def test_a_damaged_blob_that_a_prefetch_finds_can_be_repaired(tmp_path: Path, messages: Messages, run: Run) -> None:
    store_path, state = tmp_path / "store", {"w": torch.arange(40.0)}
    casckpt.open(store_path).save(state, run="a", step=1)
    shutil.copytree(store_path, tmp_path / "copy")
    changed_blob(store_path)
    store = Store(Repository(FarStore(LocalStore(store_path)), tmp_path / "cache", cache_bytes=1 << 30))
    with messages.error(Damaged) as advice:
        store.pre_download("a@1")
    run(*advice.command("verify"), store_path, status=4)
    run(*advice.command("repair"), store_path, "--from", tmp_path / "copy")
    assert Store(Repository(FarStore(LocalStore(store_path)), tmp_path / "new", cache_bytes=1 << 30)).pre_download(
        "a@1"
    )


@follows("contents/signatures.py:check_trusted", "If you know that it is genuine, sign it with `casckpt sign`")
@follows("contents/signatures.py:check_verified", "this store was opened with require_signature")
def test_a_checkpoint_without_a_signature_can_be_signed_as_advised(
    saved: Store, tmp_path: Path, messages: Messages, run: Run, weights: dict[str, torch.Tensor]
) -> None:
    store_path, alice = tmp_path / "store", pair(tmp_path / "keys")
    reader = casckpt.open(store_path, require_signature=alice.public)
    with messages.error(Unsigned) as advice:
        reader.read("a@1")
    run(*advice.command("sign"), store_path, "a@1", "--key", alice.private)
    assert torch.equal(reader.read("a@1")["w"], weights["w"])
    with messages.error(InvalidInput) as advice:
        reader.read("a@1", verify=False)
    advice.says("require_signature")
    assert torch.equal(saved.read("a@1", **advice.argument("verify"))["w"], weights["w"])


# caches


@follows("saving/saver.py:Saver._checked.compare_sizes", "or open the store with staging_bytes=%d or more")
def test_a_larger_budget_allows_saves_in_the_background(tmp_path: Path, messages: Messages) -> None:
    state, store = {"w": torch.arange(2000.0)}, casckpt.open(tmp_path / "store", staging_bytes="1KiB")
    with messages.log() as advice:
        assert store.save_async(state, run="a", step=1).done()
    more: Any = advice.argument("staging_bytes")
    store = casckpt.open(tmp_path / "store", **more)
    store.save_async(state, run="a", step=2).result()
    assert store._saver.get().background.staging.nbytes == state["w"].nbytes


@follows("tensors/staging.py:Staging._grow", "or open the store with staging_bytes=0, which saves without copies")
def test_a_process_without_memory_for_a_copy_can_save_without_one(
    tmp_path: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(staging, "AlignedBuffer", no_memory)
    with messages.error(CasckptError) as advice:
        casckpt.open(tmp_path).save_async({"w": torch.arange(2000.0)}, run="a", step=1).result()
    more: Any = advice.argument("staging_bytes")
    assert casckpt.open(tmp_path, **more).save_async({"w": torch.arange(2000.0)}, run="a", step=1).result().step == 1


@follows("repository/blob_cache.py:BlobCache.fill", "allow more (cache_bytes), or use a larger disk (cache_dir)")
def test_a_cache_that_is_too_small_can_be_enlarged_as_advised(tmp_path: Path, messages: Messages) -> None:
    storage = far()
    store = Store(Repository(storage, tmp_path / "one"))
    store.save({"w": torch.arange(2000.0)}, run="a", step=1)
    with messages.error(InvalidInput) as advice:
        Store(Repository(storage, tmp_path / "tight", cache_bytes=100)).pre_download("a@1")
    more: Any = {advice.says("cache_bytes"): 1 << 20}
    assert Store(Repository(storage, tmp_path / "tight", **more)).pre_download("a@1") > 8000
    assert casckpt.open(tmp_path, cache_dir=tmp_path / "more", **more).repository.cache_bytes == 1 << 20


@follows("repository/blob_cache.py:BlobCache.fill", "you can also pass a different cache_dir")
def test_a_different_folder_can_be_used_if_the_cache_is_not_writable(tmp_path: Path, messages: Messages) -> None:
    storage = far()
    Store(Repository(storage, tmp_path / "one")).save({"w": torch.arange(2000.0)}, run="a", step=1)
    (tmp_path / "file").write_text("no folder")
    with messages.error(StorageError) as advice:
        Store(Repository(storage, tmp_path / "file", cache_bytes=1 << 20)).pre_download("a@1")
    advice.says("different cache_dir")
    assert Store(Repository(storage, tmp_path / "other", cache_bytes=1 << 20)).pre_download("a@1") > 8000


@follows(
    "repository/catalogue.py:Catalogue._turn_off", "create a new one, or choose a different folder with --cache-dir"
)
@pytest.mark.parametrize("way", ["reindex", "--cache-dir"])
def test_an_unreadable_catalogue_can_be_rebuilt_as_advised(
    tmp_path: Path, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    cache = tmp_path / "cache"
    store = casckpt.open(store_path, cache_dir=cache)
    store.save({"x": 1}, run="a", step=1)
    path = store.repository.catalogue.path
    store.repository.catalogue.close()
    path.write_bytes(b"no database" * 1000)
    with messages.log() as advice:
        assert len(casckpt.open(store_path, cache_dir=cache).checkpoints()) == 1
    if way == "reindex":
        run(*advice.command("reindex"), store_path, "--cache-dir", cache)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM records").fetchone()[0]
    else:
        run("list", store_path, advice.says("--cache-dir"), tmp_path / "other")
        assert list((tmp_path / "other").rglob("*"))


@follows("contents/manifests.py:reindex", "free some space there, or pass a different --cache-dir")
def test_a_catalogue_can_be_created_in_a_writable_folder(
    saved: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    folder = Repository(saved.repository.storage, tmp_path / "full").catalogue.path.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("no folder")
    advice = messages.text(run("reindex", tmp_path / "store", "--cache-dir", tmp_path / "full", status=1).output)
    run("reindex", tmp_path / "store", advice.says("--cache-dir"), tmp_path / "other")
    assert list((tmp_path / "other").rglob("*"))


# merging


@follows("frontends/merging.py:", "select other keys with keys= (--keys)")
def test_a_merge_of_other_keys_works_if_a_checkpoint_lacks_one(saved: Store, run: Run, messages: Messages) -> None:
    saved.save({"w": torch.ones(6)}, run="b", step=1)
    with messages.error(MissingKey) as advice:
        saved.merge("a@1", "b@1", run="m", step=1)
    given: Any = {advice.says("keys"): ["w"]}
    saved.merge("a@1", "b@1", run="m", step=1, **given)
    run("merge", saved.url, "a@1", "b@1", "--run", "m", "--step", "2", advice.says("--keys"), "w")
    assert [[*saved.read(f"m@{step}")] for step in (1, 2)] == [["w"]] * 2


@follows("frontends/follow.py:_alone", "pass merge= (--merge) as before")
def test_a_follower_without_the_rule_of_its_folder_continues_with_it_or_elsewhere(
    saved: Store, run: Run, messages: Messages, tmp_path: Path
) -> None:
    list(Follower(saved, "a", tmp_path / "x", merge="ema:0.9").follow(once=True))
    with messages.error(InvalidInput) as advice:
        list(Follower(saved, "a", tmp_path / "x").follow(once=True))
    advice.says("choose an empty folder")
    assert len(list(Follower(saved, "a", tmp_path / "y").follow(once=True))) == 1
    run("follow", saved.url, "a", "--to", tmp_path / "x", "--once", advice.says("--merge"), "ema:0.9")


@follows("frontends/averaging.py:MovingAverage.advance", "select other keys with keys= (--keys)")
def test_an_average_that_cannot_continue_begins_in_a_different_folder(
    saved: Store, run: Run, messages: Messages, tmp_path: Path
) -> None:
    def follow(folder: str, *more: str) -> None:
        run("follow", saved.url, "b", "--to", tmp_path / folder, "--once", "--merge", "ema:0.9", *more)

    saved.save({"w": torch.ones(2), "x": torch.ones(2)}, run="b", step=2)
    follow("x")
    follow("w", "--keys", "w")
    saved.save({"w": torch.ones(2), "x": torch.ones(3)}, run="b", step=3)
    with messages.error(Mismatch) as advice:
        list(Follower(saved, "b", tmp_path / "x", merge="ema:0.9").follow(once=True))
    follow("w", advice.says("--keys"), "w")
    advice.says("a different folder")
    follow("y")


@follows("frontends/merging.py:_Merging.choose", "keep that of the last one with keep= (--keep), or select")
def test_a_merge_keeps_the_last_version_of_a_wrapper(saved: Store, run: Run, messages: Messages) -> None:
    for step in (2, 3):
        saved.save({"w": torch.ones(2), "s": torch.eye(3).mul(step).to_sparse()}, run="b", step=step)
    with messages.error(Mismatch) as advice:
        saved.merge("b@..", run="m", step=1)
    advice.says("keep=")
    assert saved.read(saved.merge("b@..", run="m", step=1, keep=["s"]))["s"].to_dense()[0, 0] == 3
    run("merge", saved.url, "b@..", "--run", "m", "--step", "2", advice.says("--keep"), "s")
    run("merge", saved.url, "b@..", "--run", "m", "--step", "3", advice.says("--keys"), "w")


@follows(
    "frontends/merging.py:_Merging.choose",
    "`casckpt show --tensors` lists its keys; select tensors of floats with keys=",
)
def test_a_merge_selects_tensors_of_floats(saved: Store, run: Run, messages: Messages) -> None:
    saved.save({"optimizer": {"m": torch.ones(2)}, "n": torch.tensor(1)}, run="b", step=1)
    with messages.error(MissingKey) as advice:
        saved.merge("b@1", run="m", step=1)
    command = advice.command("show")
    assert "optimizer.m" in run(*command[:1], saved.url, "b@1", *command[1:]).stdout
    advice.says("keys=")
    saved.merge("b@1", run="m", step=1, keys=["optimizer.*"])
    run("merge", saved.url, "b@1", "--run", "m", "--step", "2", advice.says("--keys"), "optimizer.*")
