"""What gc deletes, keeps, defers and reports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from casckpt.base.progress import Progress
from casckpt.cli.describe import plain
from casckpt.contents import manifests
from casckpt.errors import Damaged, NotFound, StorageError
from casckpt.format.keys import blob_key, commit_key, manifest_key
from casckpt.format.names import TxId
from casckpt.history import commits, tags, transactions
from casckpt.history.commits import Commit, list_commits
from casckpt.history.leases import hold
from casckpt.plan.retention import Policy, Rotation
from casckpt.repository.repository import Repository
from casckpt.storage.local import syscalls
from casckpt.storage.local.newfile import Naming, temporary_name
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.gc.ages import min_age_of
from casckpt.upkeep.gc.forgetting import rotate
from casckpt.upkeep.gc.gc import GcResult, execute, plan_gc
from tests.support.faulty import Call, Fault, FaultyStore, call_first, fail_before
from tests.support.gcs import LAST, begin_elsewhere, keys, run_gc, snapshot, steps, ticking
from tests.support.local import only
from tests.support.progress_calls import ProgressCalls
from tests.support.repositories import Ticks, meanwhile, memory, put_blob, repository, save
from tests.support.timed import TimedStore


@contextmanager
def acting_as(user: int, group: int, *, umask: int) -> Iterator[None]:
    """Inside the context, this process has the rights of a user of one group, and its umask."""
    groups, before = os.getgroups(), os.umask(umask)
    os.setgroups([])
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)


# deleted and kept


def test_gc_frees_disk_space_in_a_folder(tmp_path: Path) -> None:
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


def test_blobs_used_by_a_remaining_checkpoint_are_kept(repo: Repository) -> None:
    old = save(repo, step=0, texts=["shared", "alone"])
    shared = next(ref for ref in manifests.get(repo, old).blobs if ref.size == len("shared"))
    save(repo, step=1, texts=["new"], reused=[shared])
    result = run_gc(repo, LAST)
    assert blob_key(old.txid, shared.hash) in keys(repo)
    assert (result.deleted_blobs, result.deleted_bytes, result.kept_bytes) == (1, len("alone"), len("sharednew"))


def test_gc_without_a_policy_only_purges_forgotten_checkpoints(repo: Repository) -> None:
    old, new = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    assert run_gc(repo).deleted_blobs == 0
    commits.forget(repo, old)
    result = run_gc(repo)
    assert (steps(result.forgotten), steps(result.purged), result.deleted_blobs) == ([], [0], 1)
    assert list_commits(repo).live() == [new]


def test_a_second_gc_finds_nothing_to_delete(repo: Repository) -> None:
    for step in range(3):
        save(repo, step=step, texts=[str(step)])
    run_gc(repo, LAST)
    before = snapshot(repo)
    again = run_gc(repo, LAST)
    assert (again.forgotten, again.purged, again.deleted_blobs, again.deleted_manifests) == ((), (), 0, 0)
    assert snapshot(repo) == before


def test_uploads_of_revoked_transactions_are_deleted(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half a save")
    transactions.revoke(repo, txid, "aborted")
    result = run_gc(repo)
    assert (result.deleted_blobs, result.revoked, result.waiting) == (1, (), ())
    assert keys(repo, "transactions/") == set()
    assert keys(repo, "commits/") == {f"commits/{txid}"}, "its record must stay"


def test_gc_can_be_limited_to_one_run(repo: Repository) -> None:
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


def test_gc_of_a_missing_store_raises_not_found(tmp_path: Path) -> None:
    repo = Repository(memory(), tmp_path)
    with pytest.raises(NotFound):
        plan_gc(repo)


def test_gc_makes_the_records_it_read_durable_before_it_deletes(tmp_path: Path) -> None:
    """The process that wrote a purge record may have died before the record's name was durable.

    A power loss would then undo the purge.
    """
    faults = FaultyStore(memory())
    repo = repository(tmp_path, faults)
    for step in range(3):
        save(repo, step=step, texts=[str(step)])
    faults.calls.clear()
    run_gc(repo, LAST)
    calls = [
        call.method for call in faults.calls if (call.method, call.key) == ("settle", "commits") or is_change(call)
    ]
    assert calls[:2] == ["settle", "delete"]


def is_change(call: Call) -> bool:
    return call.method == "delete" and call.key.startswith("objects/")


def test_the_progress_of_gc_counts_every_deleted_object(repo: Repository) -> None:
    for step in range(3):
        save(repo, step=step, texts=[f"{step}a", f"{step}b"])
    seen = ProgressCalls()
    result = run_gc(repo, LAST, progress=Progress(seen))
    assert seen.done == seen.total == result.deleted_blobs + result.deleted_manifests == 6


# age


@pytest.mark.parametrize("where", ["repo", "remote"])
def test_forgotten_checkpoints_are_kept_for_a_day(where: str, request: pytest.FixtureRequest) -> None:
    """During the day, gc reports how many bytes it will free, and when. The test uses a folder and a bucket."""
    repo: Repository = request.getfixturevalue(where)
    old = save(repo, step=0, texts=["shared", "alone"])
    shared = next(ref for ref in manifests.get(repo, old).blobs if ref.size == len("shared"))
    save(repo, step=1, texts=["new"], reused=[shared])
    planned = run_gc(repo, LAST, min_age=None, dry_run=True)
    first = run_gc(repo, LAST, min_age=None)
    assert (steps(first.forgotten), first.purged, first.deleted_blobs) == ([0], (), 0)
    assert (first.later_blobs, first.later_bytes) == (planned.later_blobs, planned.later_bytes) == (1, len("alone"))
    assert [(one.reason, one.step) for one in first.waiting] == [("young", 0)]
    ticking(repo)(23 * 3600)
    assert run_gc(repo, LAST, min_age=None).deleted_blobs == 0
    ticking(repo)(3600)
    last = run_gc(repo, LAST, min_age=None)
    assert (steps(last.purged), last.deleted_blobs, last.later_blobs, last.waiting) == ([0], 1, 0, ())


def test_the_minimum_age_can_be_an_option_or_a_setting(repo: Repository) -> None:
    for step in range(3):
        save(repo, step=step, texts=[str(step)])
    clock = repo.clock
    assert isinstance(clock, Ticks)
    repo.storage = TimedStore(repo.storage, clock)
    repo.change_settings(min_age_seconds=100.0)
    assert run_gc(repo, Policy(keep_last=2), min_age=None).purged == ()
    ticking(repo)(100)
    assert steps(run_gc(repo, min_age=None).purged) == [0]
    assert run_gc(repo, LAST, min_age=200.0).purged == ()
    ticking(repo)(100)
    assert run_gc(repo, min_age=200.0).purged == ()
    assert steps(run_gc(repo, min_age=None).purged) == [1]


def test_ephemeral_checkpoints_have_a_shorter_minimum_age(remote: Repository) -> None:
    plain = save(remote, step=0, texts=["a"])
    short = commits.just_committed(msgspec.structs.replace(plain.committed, ephemeral=True))
    ages = min_age_of(remote, None)
    assert (ages.of(plain), ages.of(short)) == (24 * 3600 * 10**6, 15 * 60 * 10**6)
    remote.change_settings(min_age_ephemeral_seconds=1.0)
    assert min_age_of(remote, None).of(short) == 10**6


def test_the_age_of_a_forgotten_checkpoint_is_measured_from_its_forgotten_record(remote: Repository) -> None:
    old = save(remote, step=0, texts=["a"])
    ticking(remote)(10 * 86400)
    save(remote, step=1, texts=["b"])
    commits.forget(remote, old)
    assert run_gc(remote, min_age=None).purged == ()
    plan = plan_gc(remote)
    assert plan.waiting[0].until is not None
    assert plan.waiting[0].until.timestamp() == pytest.approx(remote.clock() / 1e6 + 86400, abs=1)


def test_forgetting_with_a_slow_clock_does_not_shorten_the_minimum_age(tmp_path: Path) -> None:
    storage = memory()
    repo, behind = repository(tmp_path, storage), repository(tmp_path / "behind", storage, seed=2)
    ticking(repo)(10 * 86400)
    for step in range(2):
        save(repo, step=step, texts=[str(step)])
    commits.forget(behind, list_commits(behind).visible()[0])
    assert behind.clock() < repo.clock() - 9 * 86400 * 10**6
    assert [one.reason for one in run_gc(repo, min_age=None).waiting] == ["young"]
    ticking(repo)(86400)
    assert steps(run_gc(repo, min_age=None).purged) == [0]


def test_a_save_with_a_fast_clock_does_not_lengthen_the_minimum_age(tmp_path: Path) -> None:
    storage = memory()
    repo, ahead = repository(tmp_path, storage), repository(tmp_path / "ahead", storage, seed=2)
    ticking(ahead)(10 * 86400)
    for step in range(2):
        save(ahead, step=step, texts=[str(step)])
    commits.forget(repo, list_commits(repo).visible()[0])
    assert [one.reason for one in run_gc(repo, min_age=None).waiting] == ["young"]
    ticking(repo)(86400)
    assert steps(run_gc(repo, min_age=None).purged) == [0]


# tags


def test_tagged_checkpoints_are_neither_forgotten_nor_purged(repo: Repository) -> None:
    old = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    tags.set_tag(repo, "best", old[0])
    _, held = hold(repo, "gone", old[1], 3600.0)
    commits.forget(repo, held)
    result = run_gc(repo, LAST)
    assert (result.forgotten, result.purged) == ((), ())
    assert [(one.reason, one.step, one.tags) for one in result.waiting] == [("tagged", 1, ("gone",))]
    tags.delete_tag(repo, "gone")
    assert steps(run_gc(repo, LAST).purged) == [1]


def test_a_tag_set_after_the_plan_protects_its_checkpoint(repo: Repository) -> None:
    old = [save(repo, step=step, texts=[str(step)]) for step in range(3)]
    commits.forget(repo, old[1])
    plan = plan_gc(repo, LAST, min_age=0.0)
    assert (steps(plan.forget), steps(plan.purge)) == ([0], [0, 1])
    tags.set_tag(repo, "best", old[0])
    tags.set_tag(repo, "back", list_commits(repo).commits[old[1].txid])
    result = execute(repo, plan)
    assert (result.forgotten, result.purged, result.deleted_blobs) == ((), (), 0)
    assert len(list_commits(repo).visible()) == 3
    assert list_commits(repo).commits[old[0].txid].changed_at == old[0].changed_at, "it was forgotten for a moment"


def test_a_tag_set_while_gc_forgets_restores_the_checkpoint(tmp_path: Path) -> None:
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


def test_a_checkpoint_restored_after_the_plan_is_kept(repo: Repository) -> None:
    old, _ = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    commits.forget(repo, old)
    plan = plan_gc(repo)
    commits.restore(repo, old)
    assert execute(repo, plan).purged == ()
    assert len(list_commits(repo).visible()) == 2


def test_an_unreadable_tag_stops_gc(repo: Repository) -> None:
    for step in range(2):
        save(repo, step=step, texts=[str(step)])
    repo.storage.put("tags/best/0", b"nonsense")
    before = snapshot(repo)
    with pytest.raises(Damaged):
        run_gc(repo, LAST)
    assert snapshot(repo) == before


# dry run


def test_a_dry_run_reports_what_a_real_run_would_do_and_writes_nothing(tmp_path: Path) -> None:
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
        return {name: value for name, value in plain(result).items() if name != "dry_run"}

    assert told(dry) == told(real)


def test_a_dry_run_names_open_transactions(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    dry = run_gc(repo, dry_run=True)
    assert dry.deleted_blobs == 1
    assert [(one.reason, one.run, one.step, one.host, one.pid) for one in dry.waiting] == [
        ("transaction", "other", 7, "gpu7", 4711)
    ]


def test_a_gc_result_converts_to_plain_json(remote: Repository) -> None:
    old, _ = save(remote, step=0, texts=["a"]), save(remote, step=1, texts=["b"])
    txid = begin_elsewhere(remote)
    put_blob(remote, txid, "half")
    found = json.loads(json.dumps(plain(run_gc(remote, LAST, min_age=None, dry_run=True))))
    assert found["forgotten"] == [{"id": old.id, "run": "run", "step": 0}]
    assert {"purged", "deleted_blobs", "deleted_bytes", "kept_blobs", "kept_bytes", "dry_run"} <= found.keys()
    assert [one["reason"] for one in found["waiting"]] == ["young", "transaction"]
    assert "T" in found["waiting"][0]["until"]
    assert found["waiting"][1]["since"].endswith("+00:00")


# leftovers of killed processes


@pytest.mark.parametrize("folder", ["commits", "settings", "tags/best", "damaged/x/y", "probes", ""])
def test_leftovers_of_killed_puts_beside_records_are_deleted(tmp_path: Path, folder: str) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    save(repo, texts=["a"])
    where = tmp_path / "store" / folder
    where.mkdir(parents=True, exist_ok=True)
    (where / temporary_name("x")).touch()
    run_gc(repo)
    assert list((tmp_path / "store").rglob(".*")) == [tmp_path / "store" / ".spare"]


def test_empty_folders_and_leftovers_of_uploads_are_deleted(tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    kept = save(repo, texts=["a"])
    saving = begin_elsewhere(repo)
    objects = tmp_path / "store/objects"
    empty, left = repo.new_txid("run", 5), repo.new_txid("run", 6)
    for txid in (empty, left, saving):
        (objects / txid).mkdir()
    for txid in (left, saving):
        (objects / txid / temporary_name("x")).write_bytes(bytes(100))
    run_gc(repo, wait=0.0)
    assert {path.name for path in objects.iterdir()} == {kept.txid, saving}
    assert len(list((objects / saving).iterdir())) == 1, "somebody may be putting there"


def test_a_put_whose_temporary_file_gc_deleted_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(Naming.LINK, monkeypatch)
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    link = syscalls.link_named
    swept: list[str] = []

    def link_late(folder: int, old: str, new: str) -> None:
        if not swept:  # a gc also puts a note
            swept.append(new)
            run_gc(Repository(LocalStore(tmp_path / "store"), tmp_path / "other", clock=Ticks()))
        link(folder, old, new)

    monkeypatch.setattr(syscalls, "link_named", link_late)
    commit = save(repo, texts=["a"])
    assert swept
    assert list_commits(repo).live() == [commit]


def test_gc_respects_a_mirror_that_was_set_after_the_plan(repo: Repository) -> None:
    save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    plan = plan_gc(repo, LAST, min_age=0.0)
    assert steps(plan.purge) == [0]
    repo.change_settings(mirror="memory://behind")
    assert execute(repo, plan).purged == ()
    assert execute(repo, plan_gc(repo, LAST, min_age=0.0)).deleted_blobs == 0


# listings by gc

TAGS = ["tags", "leases"]
PLAN = ["commits", *TAGS]
CHECK = ["objects", "commits"]  # the plan's listing finds the guards
TAKE_UP = ["commits"]  # also finds the guards for the first pass
SEARCH = ["objects", "commits", "transactions"]  # steps 2 to 4
LOOK = ["commits", "transactions"]  # step 5, each time that gc checks the open transactions
ROOTS = ["commits"]
TIDY = ["commits", "transactions", *TAGS]
RECOVERY = ["commits"]


def listings(store: FaultyStore) -> list[str]:
    """Return the listed folders in order, except for folders of single uploaders."""
    names = (key.rstrip("/") for key in store.keys("list"))
    return [name for name in names if name in {"commits", "objects", "transactions", *TAGS}]


def fail_a_save(repo: Repository) -> TxId:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    return txid


def idle(repo: Repository) -> list[str]:
    run_gc(repo)
    return [*PLAN, *TAKE_UP, *SEARCH, *TIDY, *RECOVERY]


def with_garbage(repo: Repository) -> list[str]:
    transactions.revoke(repo, fail_a_save(repo), "aborted")
    return [*PLAN, *TAKE_UP, *SEARCH, *ROOTS, *TIDY, *RECOVERY]


def with_an_open_save(repo: Repository) -> list[str]:
    fail_a_save(repo)
    return [*PLAN, *TAKE_UP, *SEARCH, *LOOK, *TIDY, *RECOVERY]


def that_purges(repo: Repository) -> list[str]:
    commits.forget(repo, list_commits(repo).live()[0])
    return [*PLAN, *CHECK, *TAGS, *TAKE_UP, *SEARCH, *ROOTS, *TIDY, *RECOVERY]


def that_forgets_and_purges(repo: Repository) -> list[str]:
    save(repo, step=3, texts=["3"])
    return [*PLAN, *CHECK, *TAGS, *TAKE_UP, *SEARCH, *ROOTS, *TIDY, *RECOVERY]


def that_spares_a_tagged_checkpoint(repo: Repository) -> list[str]:
    """The tag is set after gc has made its plan. Because it names a checkpoint, gc lists commits after the tags."""
    commits.forget(repo, list_commits(repo).live()[0])
    hidden = list_commits(repo).live()[0]
    assert isinstance(repo.storage, FaultyStore)
    repo.storage.inject(
        call_first("list", meanwhile(lambda: tags.write_generation(repo, "held", 1, hidden)), key="objects")
    )
    return [*PLAN, *CHECK, *TAGS, "commits", *TAKE_UP, *SEARCH, *TIDY, *RECOVERY]


def that_goes_on(repo: Repository) -> list[str]:
    txid = fail_a_save(repo)
    assert run_gc(repo, wait=0.0).waiting
    transactions.revoke(repo, txid, "aborted")
    return [*PLAN, *TAKE_UP, *LOOK, *ROOTS, "commits", *SEARCH, *TIDY, *RECOVERY]


def that_waits_again(repo: Repository) -> list[str]:
    fail_a_save(repo)
    assert run_gc(repo, wait=0.0).waiting
    return [*PLAN, *TAKE_UP, *LOOK, "objects", *TIDY, *RECOVERY]


KINDS_OF_GC = [
    idle, with_garbage, with_an_open_save, that_purges, that_forgets_and_purges, that_spares_a_tagged_checkpoint,
    that_goes_on, that_waits_again,
]  # fmt: skip


@pytest.mark.parametrize("near", [True, False], ids=["near", "remote"])
@pytest.mark.parametrize("prepare", KINDS_OF_GC)
def test_gc_makes_only_the_listings_that_its_steps_need(
    tmp_path: Path, prepare: Callable[[Repository], list[str]], near: bool
) -> None:
    store = FaultyStore(memory(near=near))
    repo = repository(tmp_path, store)
    for step in range(3):
        save(repo, step=step, texts=[str(step)])
    wanted = prepare(repo)
    store.calls.clear()
    run_gc(repo, LAST if prepare is that_forgets_and_purges else None, wait=0.0)
    assert listings(store) == wanted


def test_a_dry_run_makes_the_listings_of_steps_1_to_4(tmp_path: Path) -> None:
    store = FaultyStore(memory())
    repo = repository(tmp_path, store)
    for step in range(3):
        save(repo, step=step, texts=[str(step)])
    store.calls.clear()
    assert run_gc(repo, LAST, dry_run=True).deleted_blobs == 2
    assert listings(store) == [*PLAN, *SEARCH]


# files of other users


def refusing(method: str, key: str) -> Fault:
    """Return a fault like the error of another user's folder."""
    error = StorageError("permission denied", path=f"/store/{key.strip('*')}", refused=True)
    return fail_before(method, key=key, error=error, times=99)


def blob_keys(repo: Repository, commit: Commit) -> list[str]:
    return [blob_key(uploader, blob) for uploader, blob, _ in manifests.blobs_of(repo, commit)]


def test_gc_skips_a_blob_that_it_may_not_delete_and_names_it(repo: Repository, faults: FaultyStore) -> None:
    one, two, _ = (save(repo, run, step, texts=[f"{run}{step}"]) for run, step in (("a", 0), ("b", 0), ("c", 0)))
    for commit in (one, two):
        commits.forget(repo, commit)
    (blob,) = blob_keys(repo, two)
    faults.inject(refusing("delete", blob))
    result = run_gc(repo)
    assert (result.deleted_blobs, result.deleted_manifests) == (1, 2)
    (refusal,) = result.refused
    assert (refusal.path, refusal.run, refusal.why) == (f"/store/{blob}", "b", "permission denied")
    assert plain(result)["refused"] == [vars(refusal)]
    assert blob in keys(repo)
    faults.heal()
    again = run_gc(repo)
    assert (again.deleted_blobs, again.refused) == (1, ()), "a later gc deletes it"
    assert blob not in keys(repo)


@pytest.mark.parametrize("what", ["forgotten", "purged"])
def test_a_checkpoint_whose_record_is_refused_loses_nothing(what: str, repo: Repository, faults: FaultyStore) -> None:
    for run in ("a", "b"):
        for step in range(2):
            save(repo, run, step, texts=[f"{run}{step}"])
    theirs = next(one for one in list_commits(repo).live() if (one.run, one.step) == ("b", 0))
    number = {"forgotten": 1, "purged": 2}[what]
    faults.inject(refusing("put", commit_key(theirs.txid, number)))
    result = run_gc(repo, LAST)
    assert [(one.run, one.step) for one in result.purged] == [("a", 0)]
    assert [one.run for one in result.refused] == ["b"]
    assert result.deleted_blobs == 1
    assert {*blob_keys(repo, theirs), manifest_key(theirs.txid, theirs.id)} <= keys(repo)
    faults.heal()
    assert [(one.run, one.step) for one in run_gc(repo, LAST).purged] == [("b", 0)]


def test_a_dead_save_that_may_not_be_revoked_is_still_waited_for(repo: Repository, faults: FaultyStore) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "perhaps a save")
    faults.inject(refusing("put", commit_key(txid)))
    result = run_gc(repo, wait=10.0, revoke_after=1.0)
    assert ([one.txid for one in result.waiting], result.revoked, len(result.refused)) == ([txid], (), 1)
    assert result.deleted_blobs == 0
    assert len(keys(repo)) == 1


def test_a_refused_read_stops_all_deletion(repo: Repository, faults: FaultyStore) -> None:
    commits.forget(repo, save(repo, step=0, texts=["a"]))
    before = keys(repo)
    faults.inject(fail_before("list", key="commits/*", error=StorageError("permission denied"), times=99))
    with pytest.raises(StorageError, match="denied"):
        run_gc(repo)
    faults.heal()
    assert keys(repo) == before


def test_gc_keeps_the_folders_at_the_top_of_a_store(tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    transactions.revoke(repo, begin_elsewhere(repo), "aborted")
    before = {path.name for path in (tmp_path / "store").iterdir()}
    run_gc(repo)
    assert keys(repo, "transactions/") == set()
    assert "transactions" in before
    assert {path.name for path in (tmp_path / "store").iterdir()} == before | {"ran"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")
def test_gc_of_one_user_deletes_what_it_may_beside_another_users_folder() -> None:
    with TemporaryDirectory() as named:
        root = Path(named)
        root.chmod(0o755)
        (root / "store").mkdir(mode=0o775)
        os.chown(root / "store", 0, 4100)
        (root / "store").chmod(0o2775)
        runs, olds = {"a": 4101, "b": 4102}, list[Commit]()
        for seed, (run, user) in enumerate(runs.items()):
            (root / run).mkdir()
            os.chown(root / run, user, 4100)
            with acting_as(user, 4100, umask=0o077):
                repo = repository(root / run, LocalStore(root / "store"), seed=seed)
                olds.append(save(repo, run, 0, texts=[f"{run}0"]))
                save(repo, run, 1, texts=[f"{run}1"])
        theirs = olds[1].txid
        (root / "store/objects" / theirs).chmod(0o755)  # as an earlier version leaves it
        with acting_as(runs["a"], 4100, umask=0o022):
            result = run_gc(repository(root / "a", LocalStore(root / "store")), LAST)
        assert {(one.run, one.step) for one in result.purged} == {("a", 0), ("b", 0)}
        assert result.deleted_blobs == 1
        assert {(one.owner, one.run) for one in result.refused} == {("4102", "b")}
        assert {Path(one.path).parent.name for one in result.refused} == {theirs}


def test_rotation_warns_of_a_record_that_it_may_not_write(
    repo: Repository, faults: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    saved = [save(repo, "a", step, texts=[f"a{step}"]) for step in range(3)]
    faults.inject(refusing("put", commit_key(saved[0].txid, 2)))
    assert steps(rotate(repo, "a", Rotation(max_checkpoints=1))) == [0, 1], "it could be forgotten, but not purged"
    assert "rotation left a checkpoint of run a: permission denied" in caplog.text
    states = {one.step: one.last for one in list_commits(repo).commits.values()}
    assert states == {0: "forgotten", 1: "purged", 2: "committed"}
