"""gc erases a run: whatever its age and tags, at once and for good, and nothing that other runs need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casckpt.contents import manifests
from casckpt.errors import Conflict, InvalidInput, NotFound, StorageError
from casckpt.format.keys import manifest_key
from casckpt.format.sections.blobs import BlobRef
from casckpt.history import commits, tags
from casckpt.history.commits import Commit, list_commits
from casckpt.history.leases import take
from casckpt.history.transactions import revoke
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.gc import GcResult, collect
from casckpt.upkeep.repair.verify import verify
from tests.support.dying import Deadly, Killed
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.gcs import begin_elsewhere, keys, snapshot, steps, ticking
from tests.support.repositories import (
    START,
    Ticks,
    again,
    commit_draft,
    draft,
    meanwhile,
    memory,
    objects_of,
    put_blob,
    repository,
    rewrite_bare,
    save,
)

A_DAY = 24 * 3600


@pytest.fixture
def faults() -> FaultyStore:
    return FaultyStore(memory())


@pytest.fixture
def repo(tmp_path: Path, faults: FaultyStore) -> Repository:
    return filled(repository(tmp_path, faults, clock=Ticks()))


def filled(repo: Repository) -> Repository:
    """Save run "secret", whose cells run "fork" shares. Of "secret", purge, forget, rewrite and tag checkpoints."""
    repo.change_settings(min_age_seconds=7 * A_DAY)
    every = [secret(repo, step) for step in range(6)]
    shared = list(manifests.stored_blobs(repo, every[3]).names())
    save(repo, "fork", 1, reused=[BlobRef(name, size, uploader) for uploader, name, size in shared])
    save(repo, "other", 1, texts=["of another"])
    rewrite_bare(repo, every[2])
    tags.set_tag(repo, "best", every[3])
    commits.purge(repo, commits.forget(repo, every[0]))
    commits.forget(repo, every[5])
    commits.forget(repo, every[1])
    tags.write_generation(repo, "kept", 0, every[1])  # by a process that then died
    revoke(repo, begin_elsewhere(repo, "secret", 9), "it failed")
    return repo


def secret(repo: Repository, step: int) -> Commit:
    txid = repo.new_txid("secret", step)
    refs = [put_blob(repo, txid, f"cells of {step}")]
    notes: dict[str, Any] = {"metadata": {"of": "hans"}, "lineage": {"resumed_from": {"run": "secret"}}}
    return commit_draft(repo, txid, draft(refs, "secret", step), metrics={"by hans": 1.0}, **notes)


def erase(repo: Repository, **options: Any) -> GcResult:
    given: dict[str, Any] = {"erase": "secret", "wait": 0.0} | options
    if "dry_run" not in options:
        given["sleep"] = ticking(repo)
    return collect(repo, given.pop("policy", Policy()), **given)


def finished(result: GcResult) -> bool:
    assert result.erased is not None
    return result.erased.finished


def named(repo: Repository) -> set[str]:
    """Return the keys of all objects that have a word of the run, but for the name of its tag."""
    objects = objects_of(repo.storage)
    return {key for key, data in objects.items() if b"secret" in data or b"hans" in data or "secret" in key}


def check_others(repo: Repository) -> None:
    assert {str(one.run) for one in list_commits(repo).visible()} == {"fork", "other"}
    for one in list_commits(repo).visible():
        blobs = manifests.stored_blobs(repo, one).names()
        assert all(repo.storage.size(f"objects/{uploader}/{name}.safetensors") for uploader, name, _ in blobs)
    assert not verify(repo, mode="exists").records


def test_nothing_of_the_run_is_left_but_what_others_share(repo: Repository) -> None:
    shared = {key for key in keys(repo) if "safetensors" in key and "fork" not in key}
    assert named(repo)
    result = erase(repo)
    assert finished(result)
    assert result.erased is not None
    assert named(repo) == set()
    assert sorted(steps(result.purged)) == [1, 2, 2, 3, 4, 5]
    assert len(result.erased.shared) == 1
    assert set(result.erased.shared) <= shared
    assert set(result.erased.shared) < keys(repo)
    assert not tags.tags(repo)
    check_others(repo)


def test_a_run_that_is_gone_may_be_erased_again(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    secret(repo, 1)
    for _ in range(2):
        assert finished(erase(repo))
        assert not list_commits(repo).commits


def test_a_dry_run_says_what_would_go_and_writes_nothing(repo: Repository) -> None:
    before = snapshot(repo)
    planned = erase(repo, dry_run=True)
    assert snapshot(repo) == before
    done = erase(repo)
    assert steps(planned.purged) == steps(done.purged)
    assert planned.deleted_blobs == done.deleted_blobs > 0
    assert planned.erased is not None
    assert done.erased is not None
    assert planned.erased.shared == done.erased.shared
    assert (planned.waiting, planned.restored, planned.later_blobs) == ((), (), 0)


def test_the_later_records_go_a_month_later(repo: Repository) -> None:
    erase(repo)
    young = {key for key in keys(repo, "commits/") if "." in key}
    assert young
    assert isinstance(repo.clock, Ticks)
    repo.clock.advance(31 * A_DAY)
    collect(repo, Policy())
    assert not young & keys(repo, "commits/")
    check_others(repo)


REFUSED: dict[str, tuple[Callable[[Repository], object], type[Exception], str, str]] = {
    "a save is open": (lambda repo: begin_elsewhere(repo, "secret"), Conflict, "secret", "--revoke"),
    "it is unknown": (lambda _: None, NotFound, "secreet", "did you mean secret"),
    "it is a pattern": (lambda _: None, InvalidInput, "sec*", "not a valid name"),
}


@pytest.mark.parametrize(("before", "kind", "run", "says"), REFUSED.values(), ids=REFUSED)
def test_a_run_is_not_erased_if(
    repo: Repository, before: Callable[[Repository], object], kind: type[Exception], run: str, says: str
) -> None:
    before(repo)
    there = snapshot(repo)
    with pytest.raises(kind, match=says.replace("*", r"\*")):
        erase(repo, erase=run)
    assert snapshot(repo) == there


def test_open_saves_of_other_runs_delay_it(repo: Repository) -> None:
    txid = begin_elsewhere(repo, "other", 8)
    assert not finished(erase(repo))
    assert named(repo)
    revoke(repo, txid, "it failed")
    assert finished(erase(repo))
    assert named(repo) == set()


def test_a_lost_manifest_is_no_sign_that_a_gc_has_waited(repo: Repository) -> None:
    (lost,) = (one for one in list_commits(repo).visible() if (one.run, one.step) == ("secret", 4))
    repo.storage.delete(manifest_key(lost.txid, lost.id))
    txid = begin_elsewhere(repo, "other", 8)
    assert not finished(erase(repo))
    assert not list_commits(repo).over
    revoke(repo, txid, "it failed")
    assert finished(erase(repo))
    assert named(repo) == set()


def test_who_may_not_delete_erases_nothing(repo: Repository, faults: FaultyStore) -> None:
    there = snapshot(repo)
    faults.inject(fail_before("delete", error=StorageError("you may not", refused=True), times=1 << 30))
    with pytest.raises(StorageError, match="you may not"):
        erase(repo)
    assert {key for key in snapshot(repo) if not key.startswith("probes/")} == set(there)


@pytest.mark.parametrize("key", ["*.manifest", "commits/*"])
def test_an_object_that_may_not_be_deleted_is_no_success(repo: Repository, faults: FaultyStore, key: str) -> None:
    faults.inject(fail_before("delete", key=key, error=StorageError("no", path="p", refused=True)))
    result = erase(repo)
    assert result.refused
    assert not finished(result)
    manifest_of = {one.split("/")[1] for one in keys(repo) if one.endswith(".manifest")}
    assert manifest_of <= list_commits(repo).recorded - list_commits(repo).over.keys()
    assert finished(erase(repo))
    assert named(repo) == set()


def test_leases_and_tags_with_an_end_go_too(repo: Repository) -> None:
    visible = {one.step: one for one in list_commits(repo).visible() if one.run == "secret"}
    take(repo, visible[4], seconds=3600)
    tags.write_generation(repo, "eval", 0, visible[2], expires=repo.clock() - 60 * 10**6)
    assert finished(erase(repo))


def test_checkpoints_that_name_the_run_are_listed(repo: Repository) -> None:
    (first,) = (one for one in list_commits(repo).visible() if (one.run, one.step) == ("secret", 3))
    lineage = [{"resumed_from": {"id": first.id}}, {"merged_from": [{"run": "secret"}]}, {"merged_from": "secreter"}]
    for step, one in enumerate(lineage):
        made = draft([], "heir", step)
        commits.forget(repo, commit_draft(repo, repo.new_txid("heir", step), made, lineage=one))
    result = erase(repo, dry_run=True)
    assert result.erased is not None
    assert [(one.run, one.step) for one in result.erased.named_by] == [("heir", 0), ("heir", 1)]


def test_rules_apply_to_other_runs(repo: Repository) -> None:
    save(repo, "other", 2)
    result = erase(repo, policy=Policy(keep_last=1))
    assert {(one.run, one.step) for one in result.forgotten if one.run != "secret"} == {("other", 1)}
    assert {one.run for one in result.purged} == {"secret"}
    assert {one.run for one in result.waiting} == {"other"}
    assert set(result.kept) == {"fork@1", "other@2"}


RACES: dict[str, tuple[str, str]] = {
    "before the first forget": ("put", "commits/*"),
    "before objects are deleted": ("delete", "objects/*"),
    "before the list": ("put", "commits/ended/*"),
}


@pytest.mark.parametrize(("method", "key"), RACES.values(), ids=RACES)
def test_a_save_that_begins_meanwhile_is_whole(repo: Repository, faults: FaultyStore, method: str, key: str) -> None:
    (newest,) = (one for one in list_commits(repo).visible() if (one.run, one.step) == ("secret", 4))

    def saves() -> None:
        names = (
            manifests.stored_blobs(repo, newest).names() if (method, key) == RACES["before the first forget"] else ()
        )
        save(
            repo, "secret", 20, texts=["new"], reused=[BlobRef(name, size, uploader) for uploader, name, size in names]
        )

    faults.inject(call_first(method, meanwhile(saves), key=key))
    assert not finished(erase(repo))
    (left,) = (one for one in list_commits(repo).visible() if one.run == "secret")
    assert left.step == 20
    blobs = manifests.stored_blobs(repo, left).names()
    assert all(repo.storage.size(f"objects/{uploader}/{name}.safetensors") for uploader, name, _ in blobs)
    assert finished(erase(repo))
    assert named(repo) == set()


@pytest.fixture
def mirror(tmp_path: Path) -> FaultyStore:
    away = FaultyStore(memory())
    there = repository(tmp_path / "away", away)
    commits.purge(there, commits.forget(there, save(there, "secret", 3)))
    save(there, "other", 1)
    return away


@pytest.fixture
def mirrored(repo: Repository, mirror: FaultyStore) -> Repository:
    repo.change_settings(mirror=mirror.url)
    return replace(repo, mirror=mirror)


def test_a_run_that_the_mirror_has_is_erased_only_if_it_may_stay_there(
    mirrored: Repository, mirror: FaultyStore, tmp_path: Path
) -> None:
    there = snapshot(mirrored)
    with pytest.raises(Conflict, match="--keep-in-mirror"):
        erase(mirrored)
    assert snapshot(mirrored) == there
    assert finished(erase(mirrored, keep_in_mirror=True))
    assert named(mirrored) == set()
    with pytest.raises(Conflict):
        erase(mirrored)
    assert finished(erase(repository(tmp_path / "away", mirror)))
    assert finished(erase(mirrored))


def test_no_answer_of_the_mirror_is_needed(
    mirrored: Repository, mirror: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(mirrored, "other", 2)
    mirror.inject(*(fail_before(method, times=1 << 30) for method in ("get", "list", "size")))
    with caplog.at_level(logging.WARNING):
        result = erase(mirrored, policy=Policy(keep_last=1))
    assert finished(result)
    assert "erase run secret there, too" in caplog.text
    assert {one.run for one in result.forgotten} == {"secret"}
    assert {(one.run, one.reason) for one in result.waiting} == {("other", "unmirrored")}


def gc_later(repo: Repository) -> None:
    """Run two gcs, a week apart. The latter deletes what has been purged before the first."""
    for _ in range(2):
        ticking(repo)(8 * A_DAY)
        collect(repo, Policy(), wait=0.0)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_an_erase_killed_at_any_call_is_finished_by_the_next_one(tmp_path: Path, part: int, full: bool) -> None:
    objects = objects_of(filled(repository(tmp_path / "first", clock=Ticks())).storage)
    whole = Deadly(again(objects))
    assert finished(erase(repository(tmp_path / "whole", whole, clock=Ticks(START + 10**9))))
    for at in range(1 + part, whole.steps + 1, 4 if full else 24):
        storage = Deadly(again(objects), at)
        with pytest.raises(Killed):
            erase(repository(tmp_path / f"{at}", storage, clock=Ticks(START + 10**9)))
        later = [partial(repository, tmp_path / f"{at} {host}", seed=2, clock=Ticks(START + 10**10)) for host in "ab"]
        repo = later[0](storage.inner)
        check_others_of(repo)
        if at % 2:
            gc_later(repo)
            check_others_of(repo)
            left = {key.split("/")[1] for key in keys(repo) if key.endswith(".manifest")}
            assert left.isdisjoint(list_commits(repo).ended), at
        if list_commits(repo).over or any(one.run == "secret" for one in list_commits(repo).commits.values()):
            assert finished(erase(repo)), at
        assert named(repo) == set(), at
        check_others(repo)


def check_others_of(repo: Repository) -> None:
    others = [one for one in list_commits(repo).visible() if one.run != "secret"]
    assert {one.run for one in others} == {"fork", "other"}
    for one in others:
        blobs = manifests.stored_blobs(repo, one).names()
        assert all(repo.storage.size(f"objects/{uploader}/{name}.safetensors") for uploader, name, _ in blobs)
