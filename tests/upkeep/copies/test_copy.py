"""Copies between stores.

Only missing blobs are copied, and their bytes are verified. A copy is complete or absent, despite failures and other
processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.base.progress import Progress
from casckpt.contents import manifests
from casckpt.contents.refs import resolve
from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, StorageError, Unsupported
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.keys import commit_key, copied_txid, ended_key, manifest_key, parse_txid
from casckpt.format.records import Dropped
from casckpt.history import commits, tags
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import BufferPool
from casckpt.upkeep.copies import replication as replicating
from casckpt.upkeep.copies.copy import execute, plan_copy, preview
from tests.support.checkpoints import array, content, flip, only_blob, save_arrays
from tests.support.copies import chain, check_clean, contents, copy, elsewhere
from tests.support.counting import count_io
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.forging import taken_apart
from tests.support.gcs import collect, snapshot
from tests.support.progress_calls import ProgressCalls
from tests.support.repositories import committed_encoded, meanwhile, memory, repository
from tests.support.rewrites import move

# results


def test_a_copy_preserves_ids_and_times_and_the_order_and_content_of_checkpoints(
    source: Repository, target: Repository
) -> None:
    result = copy(source, target)
    assert (len(result.copied), result.failed, result.made_store) == (4, (), True)
    assert contents(target) == contents(source)
    for one, other in zip(list_commits(source).current(), list_commits(target).current(), strict=True):
        kept = ("txid", "run", "step", "manifest", "created_at", "bytes_total", "metadata", "ephemeral", "parent")
        assert [getattr(one.committed, name) for name in kept] == [getattr(other.committed, name) for name in kept]
    assert [one.committed.blobs_written for one in result.copied] == [1, 1, 1, 1]
    assert [one.committed.blobs_reused for one in result.copied] == [0, 1, 2, 3]
    check_clean(target)


def test_a_store_created_by_a_copy_has_the_same_sizes_as_the_source(tmp_path: Path, target: Repository) -> None:
    source = elsewhere(tmp_path, seed=3)
    source.create(cell_bytes=8192, blob_bytes=1 << 20)
    assert copy(source, target).made_store
    assert (target.marker.cell_bytes, target.marker.blob_bytes) == (8192, 1 << 20)
    assert target.marker.store_id != source.marker.store_id


def test_a_copy_does_not_write_to_the_source(tmp_path: Path, target: Repository) -> None:
    storage = FaultyStore(memory())
    source = chain(repository(tmp_path, storage))
    tags.set_tag(source, "best", resolve(source, "run@1"))
    storage.calls.clear()
    copy(source, target, with_tags=True)
    assert {call.method for call in storage.calls} <= {"get", "list", "open", "read_into", "size"}


def test_copying_large_blobs_uses_bounded_memory(
    source: Repository, target: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    class Pool(BufferPool):
        def __init__(self, count: int, nbytes: int) -> None:
            made.append((count, nbytes))
            super().__init__(count, nbytes)

    monkeypatch.setattr(replicating, "BufferPool", Pool)
    monkeypatch.setattr(replicating, "_MEMORY", 30_000)
    copy(source, target, "run@3", jobs=8)
    assert made == [(30_000 // made[0][1], made[0][1])]
    assert 1 < made[0][0] < 4


def test_repeating_a_copy_writes_nothing(source: Repository, target: Repository) -> None:
    copy(source, target)
    written, read = count_io(target.storage), count_io(source.storage)
    result = copy(source, target)
    assert (len(result.present), result.copied, result.nbytes) == (4, (), 0)
    assert written.puts == read.bytes_read == 0


def test_only_missing_objects_are_read_and_written(tmp_path: Path, target: Repository) -> None:
    storage = FaultyStore(memory())
    source = chain(repository(tmp_path, storage))
    copy(source, target, "run@2")
    before = len(storage.calls)
    result = copy(source, target)
    opened = [call.key for call in storage.calls[before:] if call.method == "open"]
    assert opened == [only_blob(source, resolve(source, "run@3"))]
    assert (len(result.copied), result.blobs) == (3, 1)


def test_blobs_of_other_uploaders_are_reused(source: Repository, target: Repository) -> None:
    target.create()
    save_arrays(target, {"t0": array(0)}, "theirs")
    assert copy(source, target, "run@0").blobs == 0
    assert contents(target)["run@0"] == content({"t0": array(0)})


def test_copying_an_older_checkpoint_does_not_change_the_latest_of_a_run(
    source: Repository, target: Repository
) -> None:
    copy(source, target, "run@3")
    copy(source, target, "run@0")
    assert resolve(target, "run@latest").step == 3
    mine = target.new_txid("run", 4, after=[one.txid for one in list_commits(target).live()])
    assert parse_txid(mine).time > parse_txid(resolve(target, "run@3").txid).time


def test_references_ranges_and_runs_select_the_checkpoints_to_copy(source: Repository, target: Repository) -> None:
    save_arrays(source, {"o": array(9)}, "other", 7)
    assert [one.step for one in copy(source, target, "run@1..2").copied] == [1, 2]
    assert [one.run for one in copy(source, target, run="other").copied] == ["other"]
    assert [one.step for one in copy(source, target, run="r?n").copied] == [0, 3]
    for nothing in ({"run": "nobody"}, {"run": "nobody*"}):
        with pytest.raises(NotFound, match="there is no checkpoint of run 'nobody"):
            copy(source, target, **nothing)
    with pytest.raises(NotFound, match="nobody"):
        copy(source, target, "nobody@1")


def test_a_dry_run_writes_nothing(source: Repository, target: Repository) -> None:
    plan = plan_copy(source, target)
    found = preview(source, target, plan)
    assert (len(found.copied), found.dry_run, found.made_store) == (4, True, True)
    assert not target.exists()
    assert found.nbytes == copy(source, target).nbytes


def test_the_progress_of_a_copy_adds_up_to_the_planned_bytes(source: Repository, target: Repository) -> None:
    done = ProgressCalls()
    plan = plan_copy(source, target)
    execute(source, target, plan, progress=Progress(done))
    assert done.done == plan.total == plan.nbytes  # shared blobs are copied once


def test_tags_are_copied_on_request(source: Repository, target: Repository) -> None:
    tags.set_tag(source, "best", resolve(source, "run@1"))
    tags.set_tag(source, "other", resolve(source, "run@2"))
    assert copy(source, target, "run@1").tags == ()
    assert copy(source, target, "run@1", with_tags=True).tags == ("best",)
    assert {name: tag.manifest for name, tag in tags.tags(target).items()} == {"best": resolve(source, "run@1").id}
    assert copy(source, target, "run@1", with_tags=True).tags == ()


def test_sections_of_a_later_version_are_copied_byte_for_byte(tmp_path: Path, target: Repository) -> None:
    source = repository(tmp_path)
    old = save_arrays(source, {"t": array(1)})
    parts = taken_apart(manifests.get(source, old))
    parts.index["of the future"] = 1
    data = parts.put_together()
    txid = source.new_txid("run", 0)
    source.storage.put(manifest_key(txid, data.id), data.data)
    fields = {"created_at": old.committed.created_at, "parent": old.committed.parent}
    commits.commit(source, committed_encoded(source, txid, data, "run", 0, **fields))
    made = resolve(source, data.id)
    commits.forget(source, old)
    assert copy(source, target).copied[0].id == made.id
    assert contents(target) == contents(source)


# state of the destination


def test_a_copy_to_an_occupied_step_is_a_conflict_and_all_other_checkpoints_are_copied(
    source: Repository, target: Repository
) -> None:
    target.create()
    mine = save_arrays(target, {"mine": array(5)}, step=1)
    result = copy(source, target)
    assert [one.step for one in result.copied] == [0, 2, 3]
    with pytest.raises(Conflict, match=r"run@1 .* was not copied") as raised:
        result.raise_failure()
    assert set(raised.value.checkpoints) == {mine.id, resolve(source, "run@1").id}
    assert resolve(target, "run@1").id == mine.id
    check_clean(target)


def test_a_copy_raises_conflict_if_its_step_is_occupied_at_the_last_moment(source: Repository, tmp_path: Path) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()
    hook = meanwhile(lambda: save_arrays(other, {"mine": array(5)}, step=1))
    target = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", hook, key="transactions/*")]))
    with pytest.raises(Conflict, match="a different checkpoint"):
        copy(source, target, "run@1").raise_failure()
    check_clean(target)


def test_two_simultaneous_copies_of_tags_succeed(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    tags.set_tag(source, "best", resolve(source, "run@1"))

    def first() -> None:
        copy(source, elsewhere(tmp_path, inner, seed=9), with_tags=True)

    storage = FaultyStore(inner, [call_first("put", meanwhile(first), key="tags/*")])
    result = copy(source, elsewhere(tmp_path, storage), with_tags=True)
    assert result.tags == ("best",)
    assert {name: tag.generation for name, tag in tags.tags(elsewhere(tmp_path, inner)).items()} == {"best": 0}


def test_a_copy_does_not_undo_a_concurrent_move_of_a_tag(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    tags.set_tag(source, "best", resolve(source, "run@1"))

    def other() -> None:
        target = elsewhere(tmp_path, inner, seed=9)
        tags.set_tag(target, "best", resolve(target, "run@2"))

    storage = FaultyStore(inner, [call_first("put", meanwhile(other), key="tags/*")])
    with pytest.raises(Conflict, match="another process has just moved"):
        copy(source, elsewhere(tmp_path, storage), with_tags=True)


def test_checkpoints_forgotten_in_the_destination_are_copied_only_if_named(
    source: Repository, target: Repository
) -> None:
    copy(source, target)
    commits.forget(target, resolve(target, "run@0"))
    collect(target)
    commits.forget(target, resolve(target, "run@1"))
    result = copy(source, target)
    assert ([one.step for one in result.left], result.copied) == ([0, 1], ())
    result = copy(source, target, "run@0..1")
    assert ([one.step for one in result.copied], [one.step for one in result.restored]) == ([0], [1])
    assert contents(target) == contents(source)
    assert result.copied[0].txid == copied_txid(resolve(source, "run@0").txid, 1)
    check_clean(target)


def test_a_forgotten_checkpoint_is_copied_if_named(source: Repository, target: Repository) -> None:
    old = commits.forget(source, resolve(source, "run@0"))
    assert [one.step for one in copy(source, target).copied] == [1, 2, 3]
    assert [one.id for one in copy(source, target, old.id).copied] == [old.id]


def test_a_copy_with_invalid_arguments_is_rejected(tmp_path: Path, source: Repository, target: Repository) -> None:
    with pytest.raises(InvalidInput, match="inside the store's own folder"):
        copy(source, source)
    with pytest.raises(NotFound, match="no store"):
        copy(elsewhere(tmp_path), target)
    with pytest.raises(InvalidInput, match="not valid"):
        copy(source, target, jobs=0)
    assert not target.exists()


def test_nothing_is_copied_into_a_store_with_unknown_requirements(source: Repository, target: Repository) -> None:
    target.create()
    target.change_settings(requires=["rewrites"])
    before = contents(target), snapshot(target)
    with pytest.raises(Unsupported, match="know rewrites"):
        copy(source, target)
    assert (contents(target), snapshot(target)) == before


def test_a_complete_checkpoint_is_copied_even_if_the_target_has_a_thinned_one(
    source: Repository, target: Repository
) -> None:
    copy(source, target)
    thin = move(target, resolve(target, "run@1"), dropped=Dropped(entries=1, bytes=4, rule="optimizer"))
    assert [one.step for one in copy(source, target).copied] == [1]
    assert len(copy(source, target).present) == 4
    whole = resolve(target, thin.id)
    assert whole == resolve(target, "run@1")
    assert (whole.dropped, whole.txid, whole.places.txid != thin.places.txid) == (None, thin.txid, True)
    check_clean(target)


def test_a_copied_rewrite_keeps_the_transaction_and_the_order_of_the_save(
    source: Repository, target: Repository
) -> None:
    made = move(source, resolve(source, "run@1"))
    copy(source, target)
    assert [one.step for one in list_commits(target).visible()] == [0, 1, 2, 3]
    copied = resolve(target, "run@1")
    assert copied.txid == copied.places.txid == made.txid != made.places.txid
    check_clean(target)


def test_a_checkpoint_copied_back_after_a_purge_remains_the_latest(source: Repository, target: Repository) -> None:
    copy(source, target)
    last = resolve(source, "run@3")
    commits.purge(source, commits.forget(source, last))
    copy(target, source, last.id)
    back = resolve(source, "run@latest")
    assert (back.id, back.txid) == (last.id, copied_txid(last.txid, 1))


# failures


def spoil(repo: Repository, key: str) -> None:
    """Truncate an object."""
    half = repo.storage.get(key, limit=1 << 20)[:100]
    repo.storage.replace(key, half)


def test_an_unreadable_record_is_reported_and_all_other_checkpoints_are_copied(
    source: Repository, target: Repository
) -> None:
    key = commit_key(resolve(source, "run@1").txid)
    spoil(source, key)
    assert [one.key for one in preview(source, target, plan_copy(source, target)).records] == [key]
    result = copy(source, target)
    assert [one.step for one in result.copied] == [0, 2, 3]
    ((damaged, why),) = result.records
    assert damaged == key
    assert "Restore the record from a copy of" in why
    with pytest.raises(Damaged, match="a checkpoint was not copied: commits/") as raised:
        result.raise_failure()
    assert raised.value.key == key
    assert [one.key for one in copy(source, target).records] == [key]


def test_a_damaged_list_of_logs_that_are_over_does_not_prevent_a_copy(source: Repository, target: Repository) -> None:
    source.storage.put(ended_key(0), b"torn")
    result = copy(source, target)
    assert ([one.step for one in result.copied], result.records) == ([0, 1, 2, 3], ())


@pytest.mark.parametrize(
    ("refs", "run", "is_told"),
    [(["run@0..2"], None, True), (["run@..1"], None, True), (["run@latest"], None, False),
     (["run@2.."], None, False), (["run@0"], None, False), ([], "run", True),
     ([], "r?n", True), ([], "other", False)],
)  # fmt: skip
def test_an_unreadable_record_is_an_error_only_if_it_may_be_needed(
    refs: list[str], run: str | None, is_told: bool, source: Repository, target: Repository
) -> None:
    save_arrays(source, {"o": array(9)}, "other", 7)
    spoil(source, commit_key(resolve(source, "run@1").txid))
    assert bool(copy(source, target, *refs, run=run).records) == is_told


def test_a_checkpoint_with_an_unreadable_later_record_is_copied(source: Repository, target: Repository) -> None:
    """A forgotten checkpoint may have been restored since, because its last record is unreadable."""
    hidden, seen = resolve(source, "run@1"), resolve(source, "run@2")
    commits.restore(source, commits.forget(source, hidden))
    commits.forget(source, seen)
    for key in (commit_key(hidden.txid, 2), commit_key(seen.txid, 1)):
        spoil(source, key)
    result = copy(source, target)
    assert [one.step for one in result.copied] == [0, 2, 3]
    assert [one.key for one in result.records] == [commit_key(hidden.txid)]


def test_a_copy_that_fails_with_a_storage_error_reports_its_progress(tmp_path: Path, source: Repository) -> None:
    full = FaultyStore(memory(), [fail_before("put", key=f"commits/*-{step}", times=9) for step in (2, 3)])
    target = elsewhere(tmp_path, full)
    with pytest.raises(StorageError, match=r"2 of 4 checkpoints are done; repeat the same call"):
        copy(source, target)
    full.heal()
    assert [one.step for one in copy(source, target).copied] == [2, 3]


def test_a_damaged_blob_is_read_once_for_all_checkpoints_that_share_it(tmp_path: Path, source: Repository) -> None:
    """Otherwise, each checkpoint that shares the blob, possibly thousands, would leave a revoked transaction in the
    target."""
    flip(source, only_blob(source, resolve(source, "run@1")), DATA_OFFSET)
    target = elsewhere(tmp_path, storage := FaultyStore(memory()))
    result = copy(source, target)
    assert [one.commit.step for one in result.failed] == [1, 2, 3]
    assert len({one.error.blob for one in result.failed}) == 1
    for one in result.failed:
        assert one.error.checkpoints == (one.commit.id,)
        assert one.error.keys == ("t1",)
    assert sum(key.startswith("transactions/") for key in storage.keys("put")) == 2
