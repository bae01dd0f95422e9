"""Obstacles for gc: unreadable records, failing storage, other gcs, and work that is left to the next gc."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from casckpt.contents import manifests
from casckpt.errors import Conflict, Damaged, StorageError, Unsupported
from casckpt.format.keys import manifest_key, uploader_folder
from casckpt.history import commits, transactions
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.gc import gc
from casckpt.upkeep.gc.candidates import Unreadable
from casckpt.upkeep.gc.gc import plan_gc, preview
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.gcs import LAST, RemoteStore, begin_elsewhere, keys, run_gc, snapshot, steps, ticking
from tests.support.repositories import memory, put_blob, repository, rewrite_bare, save

# damage


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_an_unreadable_live_manifest_prevents_deletion(repo: Repository, damage: str) -> None:
    saved = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    key = manifest_key(saved[1].txid, saved[1].id)
    repo.storage.delete(key)
    if damage == "torn":
        repo.storage.put(key, b"CASCKPT\x01 and no more")
    commits.forget(repo, saved[0])
    before = keys(repo)
    with pytest.raises(Damaged, match="run@1") as caught:
        run_gc(repo)
    assert caught.value.exit_status == 4
    assert caught.value.checkpoints == (saved[1].id,)
    assert keys(repo) == before
    with pytest.raises(Damaged, match="run@1"):
        run_gc(repo, dry_run=True)


@pytest.mark.parametrize(("where", "damage"), [("repo", "gone"), ("repo", "torn"), ("remote", "gone")])
def test_unreadable_manifests_are_found_before_anything_is_forgotten_or_purged(
    where: str, damage: str, request: pytest.FixtureRequest
) -> None:
    repo: Repository = request.getfixturevalue(where)
    saved = [save(repo, step=step, texts=[str(step)]) for step in range(4)]
    commits.forget(repo, saved[0])
    key = manifest_key(saved[3].txid, saved[3].id)
    repo.storage.delete(key)
    if damage == "torn":
        repo.storage.put(key, b"CASCKPT\x01 and no more")
    before = snapshot(repo)
    for _ in range(2):
        with pytest.raises(Damaged, match="run@3") as caught:
            run_gc(repo, LAST)
        assert snapshot(repo) == before
        assert (caught.value.done.forgotten, caught.value.done.purged) == ((), ())
        assert not hasattr(caught.value, "__notes__")


def test_a_failed_dry_run_reports_its_plan(repo: Repository) -> None:
    saved = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    repo.storage.delete(manifest_key(saved[2].txid, saved[2].id))
    with pytest.raises(Damaged, match="run@2") as caught:
        run_gc(repo, LAST, min_age=None, dry_run=True)
    done = caught.value.done
    assert (done.dry_run, steps(done.forgotten), done.purged) == (True, [0, 1], ())
    assert [(one.reason, one.step) for one in done.waiting] == [("young", 0), ("young", 1)]


def test_gc_works_again_once_the_damaged_checkpoint_is_purged(repo: Repository) -> None:
    saved = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    repo.storage.delete(manifest_key(saved[1].txid, saved[1].id))
    commits.forget(repo, saved[1])
    assert run_gc(repo, dry_run=True).deleted_blobs == 1
    result = run_gc(repo)
    assert (steps(result.purged), result.deleted_blobs) == ([1], 1)


def test_the_advice_in_the_error_for_a_damaged_checkpoint_lets_gc_continue(repo: Repository) -> None:
    """A day after the checkpoint was forgotten, gc continues without it.

    With `--min-age 0`, gc also purges all other forgotten checkpoints of the run.
    """
    saved = [save(repo, step=step, texts=[str(step)]) for step in range(4)]
    other = [save(repo, "other", step, texts=[f"other {step}"]) for step in range(2)]
    repo.storage.delete(manifest_key(saved[1].txid, saved[1].id))
    commits.forget(repo, saved[1])
    with pytest.raises(Damaged, match=r"`casckpt forget`: a day later, .* `--run run --min-age 0`"):
        run_gc(repo, min_age=None)
    ticking(repo)(86400)
    commits.forget(repo, saved[2])
    assert steps(run_gc(repo, min_age=None).purged) == [1]
    repo.storage.delete(manifest_key(saved[3].txid, saved[3].id))
    commits.forget(repo, saved[3])
    commits.forget(repo, other[0])
    assert steps(run_gc(repo, run="run").purged) == [2, 3]
    assert not list_commits(repo).commits[other[0].txid].visible
    assert list_commits(repo).commits[other[0].txid].live


def test_a_manifest_missing_from_a_bucket_is_detected(remote: Repository) -> None:
    old = save(remote, step=0, texts=["a"])
    manifests.blobs_of(remote, old)  # the catalogue contains it
    remote.storage.delete(manifest_key(old.txid, old.id))
    with pytest.raises(Damaged, match="gc deletes nothing"):
        run_gc(remote)


def test_an_unreadable_commit_record_prevents_deletion(repo: Repository) -> None:
    old = save(repo, step=0, texts=["a"])
    save(repo, step=1, texts=["b"])
    repo.storage.replace(f"commits/{old.txid}", b"torn")
    put_blob(repo, begin_elsewhere(repo), "half")
    before = snapshot(repo)
    with pytest.raises(Damaged, match=old.txid):
        run_gc(repo, LAST)
    assert snapshot(repo) == before


def test_a_failed_deletion_is_reported_and_the_next_gc_continues(tmp_path: Path) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    for step in range(6):
        save(repo, step=step, texts=[str(step)])
    store.inject(fail_before("delete", at=2, key="objects/*.safetensors"))
    with pytest.raises(StorageError) as caught:
        run_gc(repo, LAST)
    assert steps(caught.value.done.forgotten) == steps(caught.value.done.purged) == [0, 1, 2, 3, 4]
    assert ["run@4 (" in note for note in caught.value.__notes__] == [True]
    sent = pickle.loads(pickle.dumps(caught.value))  # as ranks exchange errors
    assert sent.done == caught.value.done
    kept = list_commits(repo).live()
    assert steps(kept) == [5]
    store.heal()
    assert run_gc(repo, LAST).deleted_manifests == 5
    assert len(keys(repo)) == 2


@pytest.mark.parametrize("number", [1, 2], ids=["forget", "purge"])
def test_a_failed_gc_reports_what_it_forgot_and_purged(tmp_path: Path, number: int) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    for step in range(6):
        save(repo, step=step, texts=[str(step)])
    store.inject(fail_before("put", at=3, key=f"commits/*.{number}"))
    with pytest.raises(StorageError) as caught:
        run_gc(repo, LAST)
    found = sorted(list_commits(repo).commits.values(), key=lambda commit: commit.step)
    gone, purged = ([one for one in found if not one.visible], [one for one in found if not one.live])
    assert steps(caught.value.done.forgotten) == steps(gone)
    assert steps(caught.value.done.purged) == steps(purged)
    assert 0 < len([gone, purged][number - 1]) < 5


def test_an_interrupted_wait_reports_what_was_purged(repo: Repository) -> None:
    for step in range(3):
        save(repo, step=step, texts=[str(step)])
    put_blob(repo, begin_elsewhere(repo), "half")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_gc(repo, LAST, sleep=interrupt)
    done = vars(caught.value)["done"]
    assert steps(done.forgotten) == steps(done.purged) == [0, 1]


def test_an_interrupted_wait_reports_which_forgotten_checkpoints_wait_at_all_of_their_places(repo: Repository) -> None:
    for step in range(2):
        save(repo, step=step, texts=[str(step)])
    rewrite_bare(repo, list_commits(repo).live()[0])
    put_blob(repo, begin_elsewhere(repo), "half")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_gc(repo, LAST, sleep=interrupt, min_age=3600.0)
    done = vars(caught.value)["done"]
    (gone,) = done.forgotten
    assert {one.txid for one in done.waiting} == {places.txid for places in gone.existing}
    assert len(done.waiting) == 2


def test_storage_without_exclusive_creates_is_rejected(tmp_path: Path) -> None:
    store = RemoteStore(str(tmp_path))
    store.exclusive = None
    repo = repository(tmp_path, store)
    assert plan_gc(repo).forget == ()
    repo.change_settings(exclusive_create=False)
    with pytest.raises(Unsupported, match="single_writer"):
        plan_gc(repo)
    assert plan_gc(replace(repo, single_writer=True)).forget == ()


# other gcs


def test_gc_starts_over_if_a_concurrent_gc_purges_a_checkpoint(tmp_path: Path) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    other = repository(tmp_path / "other", store.inner, seed=2)
    old, _ = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])

    def other_gc(call: object) -> None:
        store.heal()
        assert steps(run_gc(other, LAST).purged) == [0]

    store.inject(call_first("get", other_gc, key=manifest_key(old.txid, old.id)))
    manifests.get(repo, old)  # now cached in memory, but the cache must not be used
    result = run_gc(repo)
    assert (result.deleted_blobs, result.kept_blobs) == (0, 1)


def test_a_repeatedly_interrupted_gc_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = repository(tmp_path)
    save(repo, step=0, texts=["a"])

    def never(*_: object, **__: object) -> None:
        raise Unreadable("purged")

    monkeypatch.setattr(gc, "candidates", never)
    with pytest.raises(Conflict, match="repeatedly purged"):
        run_gc(repo)
    with pytest.raises(Conflict, match="another gc"):
        preview(repo, plan_gc(repo))


def test_gc_works_without_the_catalogue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("no folder")
    with caplog.at_level(logging.CRITICAL):
        repo = repository(tmp_path)
        for step in range(3):
            save(repo, step=step, texts=[str(step)])
        txid = begin_elsewhere(repo)
        put_blob(repo, txid, "half")
        assert run_gc(repo, LAST).waiting
        transactions.revoke(repo, txid, "enough")
        assert run_gc(repo, LAST).deleted_blobs == 3


def test_leftovers_of_killed_puts_are_deleted_with_their_transaction(tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    txid = begin_elsewhere(repo)
    folder = tmp_path / "store" / uploader_folder(txid)
    folder.mkdir(parents=True)
    (folder / ".x.safetensors.0123456789abcdef.tmp").write_bytes(b"half")
    run_gc(repo)
    assert folder.exists(), "its transaction is open yet"
    transactions.revoke(repo, txid, "enough")
    run_gc(repo)
    assert not folder.exists()
