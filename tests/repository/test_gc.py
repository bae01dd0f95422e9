"""gc as a person sees it: what goes, what stays, what waits, and what is reported."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from casckpt.errors import Conflict, Damaged, InvalidInput, NotFound, StorageError, Unsupported
from casckpt.format.keys import blob_key, manifest_key, transaction_key, uploader_folder
from casckpt.format.names import TxId
from casckpt.format.records import Began, Process
from casckpt.plan.retention import Policy
from casckpt.repository import commits, gc, manifests, paused, tags, transactions
from casckpt.repository.commits import Commit, list_commits
from casckpt.repository.gc import GcResult, collect, execute, plan_gc, preview
from casckpt.repository.marking import Unreadable
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.repository.retiring import Waiting, min_age_of
from casckpt.storage.base import Traits
from casckpt.storage.local import LocalStore
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.repositories import Ticks, blob_hash, memory, put_blob, repository, save

LAST = Policy(keep_last=1)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return repository(tmp_path)


def keys(repo: Repository, prefix: str = "objects/") -> set[str]:
    return {entry.key for entry in repo.storage.list(prefix)}


def snapshot(repo: Repository) -> dict[str, int]:
    return {entry.key: entry.size for entry in repo.storage.list("")}


def ticking(repo: Repository) -> Callable[[float], None]:
    """A sleep that lets the repository's clock go on."""
    clock = repo.clock
    assert isinstance(clock, Ticks)
    return clock.advance


def run_gc(repo: Repository, policy: Policy | None = None, **options: Any) -> GcResult:
    return collect(repo, policy, **{"sleep": ticking(repo)} | options)


def steps(found: Sequence[Commit]) -> list[int]:
    return [commit.step for commit in found]


def begin_elsewhere(repo: Repository, run: str = "other", step: int = 7, **process: Any) -> TxId:
    """A transaction of a process of which nothing can be proved, unless ``process`` says otherwise."""
    txid = repo.new_txid(run, step)
    fields: dict[str, Any] = {"host": "gpu7", "boot_id": "b", "pid": 4711, "pid_namespace": "n", "started": 1} | process
    who = Process(**fields)
    repo.put_record(transaction_key(txid), Began(txid=txid, run=run, step=step, time=repo.clock(), process=who))
    return txid


def sign(repo: Repository, txid: TxId, number: int) -> None:
    repo.storage.put(transaction_key(txid, number), b"alive")


def commit_of(repo: Repository, txid: TxId, texts: Sequence[str]) -> None:
    """The end of a save that has uploaded ``texts`` under ``txid``."""
    from tests.support import repositories as support

    refs = [support.put_blob(repo, txid, text) for text in texts]
    found = manifests.put(repo, txid, *support.body(refs, "other", 7))
    commits.commit(repo, support.committed(repo, "other", 7, manifest=found, txid=txid))


# what goes and what stays


def test_a_folder_gets_its_bytes_back_at_once(tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    saved = [save(repo, step=step, texts=[f"{step}" * 10]) for step in range(4)]
    result = run_gc(repo, Policy(keep_last=2))
    assert steps(result.forgotten) == steps(result.purged) == [0, 1]
    assert (result.deleted_blobs, result.deleted_bytes, result.deleted_manifests) == (2, 20, 2)
    assert (result.kept_blobs, result.kept_bytes) == (2, 20)
    assert keys(repo) == {
        key
        for commit in saved[2:]
        for key in (
            manifest_key(commit.txid, commit.id),
            *(blob_key(uploader, blob) for uploader, blob, _ in manifests.blobs_of(repo, commit)),
        )
    }
    folders = {path.name for path in (tmp_path / "store/objects").iterdir()}
    assert folders == {commit.txid for commit in saved[2:]}, "empty folders are left"


def test_what_another_checkpoint_needs_stays(repo: Repository) -> None:
    old = save(repo, step=0, texts=["shared", "alone"])
    shared = next(ref for ref in manifests.get(repo, old).blobs if ref.size == len("shared"))
    save(repo, step=1, texts=["new"], reused=[shared])
    result = run_gc(repo, LAST)
    assert blob_key(old.txid, shared.hash) in keys(repo)
    assert (result.deleted_blobs, result.deleted_bytes, result.kept_bytes) == (1, len("alone"), len("sharednew"))


def test_no_policy_forgets_nothing_and_purges_what_was_forgotten(repo: Repository) -> None:
    old, new = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    assert run_gc(repo).deleted_blobs == 0
    commits.forget(repo, old)
    result = run_gc(repo)
    assert (steps(result.forgotten), steps(result.purged), result.deleted_blobs) == ([], [0], 1)
    assert list_commits(repo).live() == [new]


def test_a_second_gc_finds_nothing(repo: Repository) -> None:
    for step in range(3):
        save(repo, step=step, texts=[str(step)])
    run_gc(repo, LAST)
    before = snapshot(repo)
    again = run_gc(repo, LAST)
    assert (again.forgotten, again.purged, again.deleted_blobs, again.deleted_manifests) == ((), (), 0, 0)
    assert snapshot(repo) == before


def test_uploads_of_revoked_transactions_go(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half a save")
    transactions.revoke(repo, txid, "aborted")
    result = run_gc(repo)
    assert (result.deleted_blobs, result.revoked, result.waiting) == (1, (), ())
    assert keys(repo, "transactions/") == set()
    assert keys(repo, "commits/") == {f"commits/{txid}"}, "its record must stay"


def test_a_run_can_be_named(repo: Repository) -> None:
    for run in ("a", "b"):
        for step in range(2):
            save(repo, run, step, texts=[f"{run}{step}"])
    commits.forget(repo, list_commits(repo).live()[0])
    assert run_gc(repo, LAST, run="b").deleted_blobs == 1
    assert sorted((c.run, c.step) for c in list_commits(repo).live()) == [("a", 0), ("a", 1), ("b", 1)]


def test_foreign_files_are_left_alone_and_reported(repo: Repository) -> None:
    save(repo, texts=["a"])
    repo.storage.put("objects/readme.txt", b"hello")
    result = run_gc(repo)
    assert result.foreign == ("objects/readme.txt",)
    assert "objects/readme.txt" in keys(repo)


def test_no_store_is_not_found(tmp_path: Path) -> None:
    repo = Repository(memory(), tmp_path)
    with pytest.raises(NotFound):
        plan_gc(repo)


@pytest.mark.parametrize("options", [{"wait": -1.0}, {"wait": float("nan")}, {"min_age": -1.0}])
def test_nonsense_is_refused(repo: Repository, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="makes no sense"):
        run_gc(repo, **options)


def test_progress_counts_every_deleted_object(repo: Repository) -> None:
    for step in range(3):
        save(repo, step=step, texts=[f"{step}a", f"{step}b"])
    counts: list[int] = []
    result = run_gc(repo, LAST, progress=counts.append)
    assert sum(counts) == result.deleted_blobs + result.deleted_manifests == 6


# age


class RemoteStore(MemoryStore):
    """A storage that says it is remote."""

    exclusive: bool | None = True

    @property
    def traits(self) -> Traits:
        return Traits(remote=True, read_gap=1 << 20, parallel=4, exclusive=self.exclusive)


@pytest.fixture
def remote(tmp_path: Path) -> Repository:
    return repository(tmp_path, RemoteStore(str(tmp_path)))


def test_a_bucket_keeps_what_was_forgotten_for_a_day(remote: Repository) -> None:
    for step in range(2):
        save(remote, step=step, texts=[str(step)])
    first = run_gc(remote, LAST)
    assert (steps(first.forgotten), first.purged, first.deleted_blobs) == ([0], (), 0)
    assert [(one.reason, one.step) for one in first.waiting] == [("young", 0)]
    ticking(remote)(23 * 3600)
    assert run_gc(remote, LAST).deleted_blobs == 0
    ticking(remote)(3600)
    last = run_gc(remote, LAST)
    assert (steps(last.purged), last.deleted_blobs, last.waiting) == ([0], 1, ())


def test_the_settings_and_the_caller_change_the_age(remote: Repository) -> None:
    for step in range(3):
        save(remote, step=step, texts=[str(step)])
    remote.change_settings(min_age_seconds=100.0)
    assert run_gc(remote, Policy(keep_last=2)).purged == ()
    ticking(remote)(100)
    assert steps(run_gc(remote).purged) == [0]
    assert steps(run_gc(remote, LAST, min_age=0.0).purged) == [1]


def test_ephemeral_checkpoints_wait_less(remote: Repository) -> None:
    plain = save(remote, step=0, texts=["a"])
    short = replace(plain, first=msgspec.structs.replace(plain.committed, ephemeral=True))
    ages = min_age_of(remote, None)
    assert (ages.of(plain), ages.of(short)) == (24 * 3600 * 10**6, 15 * 60 * 10**6)
    remote.change_settings(min_age_ephemeral_seconds=1.0)
    assert min_age_of(remote, None).of(short) == 10**6


def test_age_counts_from_the_forgetting(remote: Repository) -> None:
    old = save(remote, step=0, texts=["a"])
    ticking(remote)(10 * 86400)
    save(remote, step=1, texts=["b"])
    commits.forget(remote, old)
    assert run_gc(remote).purged == ()
    plan = plan_gc(remote)
    assert plan.waiting[0].until is not None
    assert plan.waiting[0].until.timestamp() == pytest.approx(remote.clock() / 1e6 + 86400, abs=1)


# tags


def test_tagged_ones_are_neither_forgotten_nor_purged(repo: Repository) -> None:
    old = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    tags.set_tag(repo, "best", old[0])
    tags.set_tag(repo, "gone", old[1])
    commits.forget(repo, old[1])
    result = run_gc(repo, LAST)
    assert (result.forgotten, result.purged) == ((), ())
    assert [(one.reason, one.step, one.tags) for one in result.waiting] == [("tagged", 1, ("gone",))]
    tags.delete_tag(repo, "gone")
    assert steps(run_gc(repo, LAST).purged) == [1]


def test_a_tag_set_after_the_plan_counts(repo: Repository) -> None:
    old = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    commits.forget(repo, old[1])
    plan = plan_gc(repo, LAST)
    assert (steps(plan.forget), steps(plan.purge)) == ([0], [0, 1])
    tags.set_tag(repo, "best", old[0])
    tags.set_tag(repo, "back", list_commits(repo).commits[old[1].txid])
    result = execute(repo, plan)
    assert (result.forgotten, result.purged, result.deleted_blobs) == ((), (), 0)
    assert len(list_commits(repo).visible()) == 3
    assert f"commits/{old[0].txid}.1" not in keys(repo, "commits/"), "it was forgotten for a moment"


def test_a_tag_set_while_gc_forgets_brings_the_checkpoint_back(tmp_path: Path) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    old, _ = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    plan = plan_gc(repo, LAST)

    def tag_meanwhile(call: object) -> None:
        store.heal()
        tags.set_tag(repo, "late", old)

    store.inject(call_first("put", tag_meanwhile, key=f"commits/{old.txid}.1"))
    result = execute(repo, plan)
    assert (result.forgotten, result.purged) == ((), ())
    assert len(list_commits(repo).visible()) == 2


def test_what_was_restored_after_the_plan_stays(repo: Repository) -> None:
    old, _ = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    commits.forget(repo, old)
    plan = plan_gc(repo)
    commits.restore(repo, old)
    assert execute(repo, plan).purged == ()
    assert len(list_commits(repo).visible()) == 2


def test_a_tag_that_cannot_be_read_stops_everything(repo: Repository) -> None:
    for step in range(2):
        save(repo, step=step, texts=[str(step)])
    repo.storage.put("tags/best/0", b"nonsense")
    before = snapshot(repo)
    with pytest.raises(Damaged):
        run_gc(repo, LAST)
    assert snapshot(repo) == before


# dry run


def test_a_dry_run_says_what_a_run_does_and_writes_nothing(tmp_path: Path) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    for step in range(4):
        save(repo, step=step, texts=[f"{step}" * 5])
    before, calls = snapshot(repo), len(store.calls)
    dry = run_gc(repo, LAST, dry_run=True)
    assert {call.method for call in store.calls[calls:]} <= {"list", "get", "size", "open", "read_into"}
    assert snapshot(repo) == before
    assert dry.dry_run
    real = run_gc(repo, LAST)
    assert not real.dry_run

    def told(result: GcResult) -> dict[str, Any]:
        return {name: value for name, value in result.to_json().items() if name != "dry_run"}

    assert told(dry) == told(real)


def test_a_dry_run_names_who_is_in_the_way(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    dry = run_gc(repo, dry_run=True)
    assert dry.deleted_blobs == 1
    assert [(one.reason, one.run, one.step, one.host, one.pid) for one in dry.waiting] == [
        ("transaction", "other", 7, "gpu7", 4711)
    ]


def test_the_json_is_plain(remote: Repository) -> None:
    old, _ = save(remote, step=0, texts=["a"]), save(remote, step=1, texts=["b"])
    txid = begin_elsewhere(remote)
    put_blob(remote, txid, "half")
    found = json.loads(json.dumps(run_gc(remote, LAST, dry_run=True).to_json()))
    assert found["forgotten"] == [{"id": old.id, "run": "run", "step": 0}]
    assert {"purged", "deleted_blobs", "deleted_bytes", "kept_blobs", "kept_bytes", "dry_run"} <= found.keys()
    assert [one["reason"] for one in found["waiting"]] == ["young", "transaction"]
    assert "T" in found["waiting"][0]["until"]
    assert found["waiting"][1]["since"].endswith("+00:00")


# waiting


def test_gc_waits_for_an_open_save_and_keeps_what_it_commits(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "slow")
    told: list[Sequence[Waiting]] = []
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            commit_of(repo, txid, ["slow"])

    result = run_gc(repo, sleep=nap, tell=told.append)
    assert len(naps) == 3
    assert [one.txid for one in told[0]] == [txid]
    assert (result.deleted_blobs, result.waiting, result.kept_blobs) == (0, (), 1)


def test_what_an_open_save_began_with_stays_although_it_is_purged_meanwhile(repo: Repository) -> None:
    old, _ = save(repo, step=0, texts=["base"]), save(repo, step=1, texts=["b"])
    txid = begin_elsewhere(repo)  # it has listed commits, and will reuse all of step 0
    reused = list(manifests.get(repo, old).blobs)

    def end(seconds: float) -> None:
        from tests.support import repositories as support

        found = manifests.put(repo, txid, *support.body(reused, "other", 7))
        commits.commit(repo, support.committed(repo, "other", 7, manifest=found, txid=txid))

    result = run_gc(repo, LAST, sleep=end)
    assert steps(result.purged) == [0]
    assert (result.deleted_blobs, result.deleted_manifests) == (0, 1)
    assert blob_key(old.txid, reused[0].hash) in keys(repo)


def test_what_was_committed_and_purged_while_gc_waited_stays_for_this_time(repo: Repository) -> None:
    """Somebody may have begun to reuse it in between, whom this gc does not wait for."""
    first = begin_elsewhere(repo)
    put_blob(repo, first, "shared")

    def meanwhile(seconds: float) -> None:
        commit_of(repo, first, ["shared"])
        begin_elsewhere(repo, step=8)  # after gc looked for open ones; it lists commits, and will reuse "shared"
        commits.purge(repo, commits.forget(repo, list_commits(repo).commits[first]))

    result = run_gc(repo, sleep=meanwhile)
    assert (result.deleted_blobs, result.waiting) == (0, ())
    assert blob_key(first, blob_hash("shared")) in keys(repo)


def test_gc_that_ran_out_of_time_says_so_and_the_next_one_goes_on(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    naps: list[float] = []
    result = run_gc(repo, wait=60.0, sleep=naps.append)
    assert sum(naps) == pytest.approx(60)
    assert (result.deleted_blobs, result.kept_blobs) == (0, 1)
    assert [(one.reason, one.txid, one.host) for one in result.waiting] == [("transaction", txid, "gpu7")]
    left = paused.take_up(repo, list_commits(repo))
    assert left is not None
    assert left.waits == {txid}
    commits.commit(repo, support_commit(repo, txid))
    later = begin_elsewhere(repo, step=8)  # began after the candidates were made: need not be waited for
    put_blob(repo, later, "later")
    result = run_gc(repo, wait=0.0)
    assert result.deleted_blobs == 1, "the next gc did not go on from where the first one stopped"
    assert [one.txid for one in result.waiting] == [later]
    transactions.revoke(repo, later, "enough")
    assert run_gc(repo).deleted_blobs == 1
    assert repo.catalogue.note(paused.NOTE) is None


def support_commit(repo: Repository, txid: TxId) -> Any:
    """A commit that names no blob."""
    from tests.support import repositories as support

    found = manifests.put(repo, txid, *support.body([], "other", 7))
    return support.committed(repo, "other", 7, manifest=found, txid=txid)


def test_a_paused_gc_is_not_continued_in_a_copy_of_the_store(tmp_path: Path) -> None:
    one = repository(tmp_path)
    txid = begin_elsewhere(one)
    put_blob(one, txid, "half")
    run_gc(one, wait=0.0)
    other = memory()
    for entry in one.storage.list(""):
        other.put(entry.key, one.storage.get(entry.key, limit=1 << 20))
    copy = repository(tmp_path, other)
    assert copy.marker.store_id == one.marker.store_id
    assert paused.take_up(one, list_commits(one)) is not None
    assert paused.take_up(copy, list_commits(copy)) is None


def test_a_paused_gc_is_not_continued_when_what_had_ended_lives_again(repo: Repository) -> None:
    old, _ = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    assert run_gc(repo, LAST, wait=0.0).waiting
    assert paused.take_up(repo, list_commits(repo)) is not None
    for number in (1, 2):  # a backup of the folder was put back
        repo.storage.delete(f"commits/{old.txid}.{number}")
    assert paused.take_up(repo, list_commits(repo)) is None


def test_a_dead_process_of_this_host_is_revoked_at_once(repo: Repository) -> None:
    here = this_process()
    fields = {name: getattr(here, name) for name in here.__struct_fields__}
    txid = begin_elsewhere(repo, **fields | {"started": here.started + 1})
    put_blob(repo, txid, "half")
    result = run_gc(repo, wait=0.0)
    assert (result.revoked, result.deleted_blobs, result.waiting) == ((txid,), 1, ())
    assert list_commits(repo).commits[txid].last == "revoked"


def test_the_dead_are_seen_to_even_if_nothing_is_to_be_deleted(repo: Repository) -> None:
    here = this_process()
    fields = {name: getattr(here, name) for name in here.__struct_fields__}
    txid = begin_elsewhere(repo, **fields | {"started": here.started + 1})
    alive = begin_elsewhere(repo)
    result = run_gc(repo)
    assert (result.revoked, result.waiting) == ((txid,), ())
    assert keys(repo, "transactions/") == {transaction_key(alive)}


def test_a_save_of_this_process_is_waited_for(repo: Repository) -> None:
    transaction = transactions.begin(repo, "run", 1)
    put_blob(repo, transaction.txid, "half")
    result = run_gc(repo)
    assert [one.pid for one in result.waiting] == [this_process().pid]
    assert transaction.abort("enough")
    assert run_gc(repo).deleted_blobs == 1


def test_silence_is_counted_over_several_gcs(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    assert run_gc(repo, wait=60.0).revoked == ()
    ticking(repo)(3000)
    sign(repo, txid, 1)
    assert run_gc(repo, wait=60.0).revoked == ()
    ticking(repo)(3000)
    assert run_gc(repo, wait=60.0).revoked == (), "the sign of life was not counted"
    ticking(repo)(3600)
    result = run_gc(repo, wait=60.0)
    assert (result.revoked, result.deleted_blobs) == ((txid,), 1)


def test_revoke_after_is_an_option_and_a_setting(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    assert run_gc(repo, wait=60.0).revoked == ()
    repo.change_settings(revoke_after_seconds=90.0)
    assert run_gc(repo, wait=20.0).revoked == ()
    assert run_gc(repo, wait=20.0).revoked == (txid,)
    other = begin_elsewhere(repo)
    put_blob(repo, other, "half")
    assert run_gc(repo, revoke_after=0.0).revoked == (other,)


def test_a_transaction_whose_file_was_removed_by_hand_is_still_waited_for(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    run_gc(repo, wait=0.0)
    repo.storage.delete(transaction_key(txid))
    result = run_gc(repo, wait=10.0)
    assert (result.deleted_blobs, [one.txid for one in result.waiting]) == (0, [txid])
    assert run_gc(repo, wait=1.0, revoke_after=5.0).revoked == (txid,)


def test_a_file_of_a_transaction_that_cannot_be_read_is_waited_for(repo: Repository) -> None:
    txid = repo.new_txid("run", 3)
    repo.storage.put(transaction_key(txid), b"torn")
    put_blob(repo, txid, "half")
    result = run_gc(repo, wait=1.0)
    assert [(one.txid, one.step, one.host) for one in result.waiting] == [(txid, 3, None)]


# damage


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_a_live_manifest_that_cannot_be_read_stops_deletion(repo: Repository, damage: str) -> None:
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


def test_purging_the_damaged_one_lets_gc_work_again(repo: Repository) -> None:
    saved = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    repo.storage.delete(manifest_key(saved[1].txid, saved[1].id))
    commits.forget(repo, saved[1])
    assert run_gc(repo, dry_run=True).deleted_blobs == 1
    result = run_gc(repo)
    assert (steps(result.purged), result.deleted_blobs) == ([1], 1)


def test_a_manifest_missing_in_a_bucket_is_noticed(remote: Repository) -> None:
    old = save(remote, step=0, texts=["a"])
    manifests.blobs_of(remote, old)  # the catalogue knows it
    remote.storage.delete(manifest_key(old.txid, old.id))
    with pytest.raises(Damaged, match="gc deletes nothing"):
        run_gc(remote)


def test_a_commit_record_that_cannot_be_read_stops_deletion(repo: Repository) -> None:
    old = save(repo, step=0, texts=["a"])
    save(repo, step=1, texts=["b"])
    repo.storage.replace(f"commits/{old.txid}", b"torn")
    put_blob(repo, begin_elsewhere(repo), "half")
    before = snapshot(repo)
    with pytest.raises(Damaged, match=old.txid):
        run_gc(repo, LAST)
    assert snapshot(repo) == before


def test_a_failed_deletion_shows_and_the_next_gc_does_the_rest(tmp_path: Path) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    for step in range(6):
        save(repo, step=step, texts=[str(step)])
    store.inject(fail_before("delete", at=2, key="objects/*.safetensors"))
    with pytest.raises(StorageError):
        run_gc(repo, LAST)
    kept = list_commits(repo).live()
    assert steps(kept) == [5]
    store.heal()
    assert run_gc(repo, LAST).deleted_manifests == 5
    assert len(keys(repo)) == 2


def test_a_storage_without_exclusive_creates_is_refused(tmp_path: Path) -> None:
    store = RemoteStore(str(tmp_path))
    store.exclusive = None
    repo = repository(tmp_path, store)
    assert plan_gc(repo).forget == ()
    repo.change_settings(exclusive_create=False)
    with pytest.raises(Unsupported, match="single_writer"):
        plan_gc(repo)
    assert plan_gc(replace(repo, single_writer=True)).forget == ()


# other gcs


def test_another_gc_that_purges_meanwhile_makes_this_one_start_again(tmp_path: Path) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    other = repository(tmp_path / "other", store.inner, seed=2)
    old, _ = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])

    def other_gc(call: object) -> None:
        store.heal()
        assert steps(run_gc(other, LAST).purged) == [0]

    store.inject(call_first("get", other_gc, key=manifest_key(old.txid, old.id)))
    manifests.get(repo, old)  # in memory, which must not count
    result = run_gc(repo)
    assert (result.deleted_blobs, result.kept_blobs) == (0, 1)


def test_a_gc_that_is_disturbed_again_and_again_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = repository(tmp_path)
    save(repo, step=0, texts=["a"])

    def never(*_: object, **__: object) -> None:
        raise Unreadable("purged")

    monkeypatch.setattr(gc, "candidates", never)
    with pytest.raises(Conflict, match="again and again"):
        run_gc(repo)
    with pytest.raises(Conflict, match="another gc"):
        preview(repo, plan_gc(repo))


def test_nothing_of_gc_needs_the_catalogue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_leftovers_of_killed_puts_go_with_their_transaction(tmp_path: Path) -> None:
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
