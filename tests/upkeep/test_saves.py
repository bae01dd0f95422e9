"""Missing or changed records of a store are reported, and gc does not run until they are restored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casckpt.contents.refs import resolve
from casckpt.errors import CasckptError, Damaged, Refused
from casckpt.format.keys import commit_key, tag_key, transaction_key
from casckpt.history import commits
from casckpt.history.commits import Commit, list_commits
from casckpt.history.tags import delete_tag, set_tag
from casckpt.plan.retention import Policy, Rotation
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.gc.forgetting import rotate
from casckpt.upkeep.repair.verify import verify
from casckpt.upkeep.saves import give_up
from casckpt.upkeep.thin import plan_thin
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import LAST, begin_elsewhere, collect, commit_of, keys, run_gc, snapshot
from tests.support.repositories import commit_draft, draft, meanwhile, put_blob, repository, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def local(root: Path, tmp_path: Path) -> Repository:
    """A store with a@0, which is tagged, and a@1."""
    repo = repository(tmp_path, LocalStore(root))
    for step in range(2):
        save(repo, "a", step, texts=[f"own {step}"])
    set_tag(repo, "best", list_commits(repo).live()[0])
    return repo


def anew(repo: Repository, host: Path) -> Repository:
    """Open the same store on a host that has no cache."""
    return Repository(repo.storage, host, clock=repo.clock)


Harm = Callable[[Path, Repository], object]


def replaced(place: Callable[[Repository], str], make: Callable[[Path], object]) -> Harm:
    def harm(root: Path, repo: Repository) -> None:
        path = root / place(repo)
        path.rename(root.parent / "away")
        make(path)

    return harm


def emptied(name: str, root: Path, repo: Repository) -> None:
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name).touch()


def last_commit(repo: Repository) -> str:
    return commit_key(list_commits(repo).live()[-1].txid)


def first_uploader(repo: Repository) -> str:
    return f"objects/{list_commits(repo).live()[0].txid}"


PLACES: dict[str, Callable[[Repository], str]] = {
    "record": last_commit,
    "commits": lambda repo: "commits",
    "tags": lambda repo: "tags",
    "tag": lambda repo: "tags/best",
    "generation": lambda repo: tag_key("best", 0),
    "objects": lambda repo: "objects",
    "uploader": first_uploader,
}
HARMS: dict[str, Harm] = {
    **{f"{name} is a pipe": replaced(place, os.mkfifo) for name, place in PLACES.items()},
    **{f"{name} is a file": replaced(PLACES[name], Path.touch) for name in ("commits", "tags", "tag", "objects")},
    **{f"{name} is a folder": replaced(PLACES[name], Path.mkdir) for name in ("record", "generation")},
    **{f"{name} is a file": partial(emptied, name) for name in ("transactions", "settings")},
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("host", ["same host", "another host"])
def test_changed_records_prevent_gc(local: Repository, root: Path, tmp_path: Path, harm: str, host: str) -> None:
    if host == "same host":
        run_gc(local)
    HARMS[harm](root, local)
    there = sorted(path for path in root.rglob("*") if path.is_file())
    looking = local if host == "same host" else anew(local, tmp_path / "other")
    with pytest.raises(CasckptError, match=r"store/(commits|tags|objects|transactions|settings)") as caught:
        collect(looking, Policy(keep_last=1), sleep=lambda seconds: None)
    assert isinstance(caught.value, Refused | Damaged)
    assert [path for path in there if not path.exists()] == []


@pytest.mark.parametrize("host", ["same host", "another host"])
@pytest.mark.parametrize("lost", ["all", "the folder", "one"])
def test_lost_records_prevent_gc_and_count_as_damage(
    local: Repository, root: Path, tmp_path: Path, lost: str, host: str
) -> None:
    if host == "same host":
        run_gc(local)
    records = [root / commit_key(commit.txid) for commit in list_commits(local).live()]
    for path in list((root / "commits").iterdir()) if lost != "one" else records[-1:]:
        path.unlink()
    if lost == "the folder":
        (root / "commits").rmdir()
    looking = local if host == "same host" else anew(local, tmp_path / "other")
    before = keys(local)
    for dry_run in (True, False):
        with pytest.raises(Damaged, match=r"records are missing.*commits/.*--give-up"):
            collect(looking, LAST, dry_run=dry_run, sleep=lambda seconds: None)
    assert keys(local) == before
    found = verify(looking, mode="exists")
    assert found.is_damaged
    gone = [f"commits/{path.name}" for path in records if not path.exists()]
    assert [key for key, why in found.records if "is missing" in why] == gone


def test_a_paused_gc_does_not_continue_after_records_were_lost(local: Repository, root: Path) -> None:
    waits = begin_elsewhere(local)
    commits.forget(local, list_commits(local).live()[1])
    assert run_gc(local, wait=0.0).waiting
    commit_of(local, waits, ["of a save that went on"])
    local.storage.delete(transaction_key(waits))
    before = keys(local)
    for path in (root / "commits").iterdir():
        path.unlink()
    with pytest.raises(Damaged, match="records are missing"):
        run_gc(local, revoke_after=0.0)
    assert keys(local) == before


def test_a_save_killed_before_its_commit_does_not_count_as_a_loss(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    commit_of(repo, txid, ["x"])
    repo.storage.delete(commit_key(txid))  # as if the save had been killed before its commit
    assert verify(repo).records == ()
    assert run_gc(repo, revoke_after=0.0).deleted_manifests == 1


def test_a_save_that_ends_between_two_listings_does_not_count_as_a_loss(repo: Repository, faults: FaultyStore) -> None:
    txid = begin_elsewhere(repo)
    commit_of(repo, txid, ["x"])
    record = repo.storage.get(commit_key(txid), limit=1 << 20)
    repo.storage.delete(commit_key(txid))

    def end() -> None:
        faults.inner.put(commit_key(txid), record)
        for entry in list(faults.inner.list("transactions/")):
            faults.inner.delete(entry.key)

    faults.inject(call_first("list", meanwhile(end), key="transactions/"))
    assert verify(repo).records == ()


def test_settings_that_this_host_has_seen_are_not_lost_unnoticed(local: Repository, root: Path) -> None:
    """They may name a mirror, which gc would no longer ask."""
    local.change_settings(mirror=str(root.with_name("mirror")))
    commits.forget(local, list_commits(local).live()[-1])
    assert [one.reason for one in run_gc(local).waiting] == ["unmirrored"]
    shutil.rmtree(root / "settings")
    before = keys(local)
    with pytest.raises(Damaged, match=r"settings/ of .* is missing"):
        run_gc(local)
    assert keys(local) == before
    local.change_settings(min_age_seconds=0.0)
    assert run_gc(local).purged


def test_rules_forget_nothing_after_records_were_lost(local: Repository, root: Path) -> None:
    """The newest checkpoint may be lost, so a rule might remove the only one that is left."""
    for step in range(10, 13):
        save(local, step=step, texts=[str(step)])
    (root / last_commit(local)).unlink()
    there = snapshot(local)
    with pytest.raises(Damaged, match="records are missing"):
        run_gc(local, LAST)
    assert snapshot(local) == there


def test_rules_leave_a_log_with_an_unreadable_record_alone_until_it_is_given_up(local: Repository) -> None:
    doubtful = list_commits(local).live()[1]
    save(local, "a", 2, texts=["2"])
    local.storage.put(commit_key(doubtful.txid, 1), b"of a later version")
    there = keys(local)
    assert rotate(local, "a", Rotation(max_checkpoints=1)) == []
    assert plan_thin(local, drop="x", keep=LAST).chosen == 0
    with pytest.raises(Damaged, match="--give-up"):
        run_gc(local)
    assert keys(local) == there
    give_up(local, doubtful.txid)
    assert run_gc(local).deleted_manifests == 1
    assert [one.step for one in list_commits(local).live()] == [0, 2]


# stores that were put together by hand


def refuses(repo: Repository) -> str:
    """Check that no rule removes anything, and return why."""
    there = snapshot(repo)
    with pytest.raises(Damaged) as caught:
        run_gc(repo, LAST)
    with pytest.raises(Damaged):
        run_gc(repo, LAST, dry_run=True)
    with pytest.raises(Damaged):
        rotate(repo, "a", Rotation(max_checkpoints=1))
    with pytest.raises(Damaged):
        plan_thin(repo, drop="x", keep=LAST)
    assert snapshot(repo) == there
    return str(caught.value)


def verified(repo: Repository) -> list[str]:
    return [record.key for record in verify(repo, mode="exists").records]


def test_rules_refuse_a_store_that_was_restored_without_its_tags(local: Repository, root: Path, tmp_path: Path) -> None:
    shutil.rmtree(root / "tags")
    fresh = anew(local, tmp_path / "other")
    assert "tags/best/0 is missing" in refuses(fresh)
    assert verified(fresh) == ["tags/best"]
    delete_tag(fresh, "best")
    assert verified(fresh) == []
    assert [commit.step for commit in run_gc(fresh, LAST).purged] == [0]


def foreign(repo: Repository, step: int, **fields: Any) -> Commit:
    txid = repo.new_txid("a", step)
    made = draft([put_blob(repo, txid, f"another's {step}")], "a", step)
    return commit_draft(repo, txid, made, **{"store": "another"} | fields)


def test_rules_refuse_checkpoints_of_another_store_until_they_are_forgotten(local: Repository) -> None:
    other = foreign(local, 1)
    foreign(local, 7, store=local.marker.store_id)
    why = refuses(local)
    assert f"{other} came from another store" in why
    assert verified(local) == [commit_key(other.txid)]
    assert resolve(local, "a@1").txid == other.txid, "loads do not look"
    commits.forget(local, other)
    assert verified(local) == []
    assert resolve(local, "a@1").txid != other.txid
    assert [commit.step for commit in run_gc(local, LAST).purged] == [1, 1]
