from __future__ import annotations

from pathlib import Path

import pytest

import casckpt
from casckpt.errors import Conflict
from casckpt.history import commits
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from tests.cli.conftest import AsJson, Run, named
from tests.support.rewrites import move

# reads


def test_restore_undoes_a_rewrite(store: casckpt.Store, saved: Path) -> None:
    old = store.get("a@2")
    moved = move(store.repository, old.commit)
    assert store.restore(old) == store.get("a@2") != old, "it is visible, wherever it lies"
    (replaced,) = (one for one in store.checkpoints(forgotten=True) if one.replaced)
    assert store.restore(replaced) == store.get("a@2") == old
    (replaced,) = (one for one in store.checkpoints(forgotten=True) if one.replaced)
    assert replaced.commit.places == moved.places
    store.gc(min_age=0)
    assert not [one for one in store.checkpoints(forgotten=True) if one.replaced]
    assert len(store.checkpoints()) == 4


# tags and removal


def test_restore_undoes_a_forget(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("forget", saved, "a@2..", "--dry-run")["dry_run"] is True
    assert len(as_json("list", saved)) == 4
    gone = as_json("forget", saved, "a@2..", "b@1")
    assert named(gone["forgotten"]) == ["a@2", "a@3", "b@1"]
    assert named(as_json("list", saved)) == ["a@1"]
    id = gone["forgotten"][0]["id"]
    assert named(as_json("restore", saved, id)["restored"]) == ["a@2"]
    assert named(as_json("list", saved)) == ["a@1", "a@2"]
    message = run("show", saved, "b@1", status=3).stderr
    assert "casckpt restore" in message
    assert named(as_json("restore", saved, "b@1", "a@..", "--dry-run")["restored"]) == ["b@1", "a@3"]
    assert "restored b@1" in run("restore", saved, "b@1", "a@..").stdout
    assert as_json("restore", saved, "a@..", status=3)["error"]["kind"] == "not-found"


def test_restore_does_not_say_that_it_restored_a_visible_checkpoint(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    store.forget("a@2")
    for dry in (["--dry-run"], []):
        told = as_json("restore", saved, "a@1", "a@2", *dry)
        assert (named(told["restored"]), named(told["visible"])) == (["a@2"], ["a@1"])
    assert run("restore", saved, "a@1").stdout == f"already visible: a@1 ({store.get('a@1').id[:12]})\n"
    assert store.restore("a@1") == store.get("a@1")


def test_restore_reports_restored_checkpoints_even_if_it_fails(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = store.forget("a@1..3")[1].commit
    plain = commits.append

    def append(repo: Repository, commit: Commit, kind: commits.LaterKind) -> Commit:
        if commit.txid == lost.txid:
            raise Conflict("somebody else was first")
        return plain(repo, commit, kind)

    monkeypatch.setattr(commits, "append", append)
    told = as_json("restore", saved, "a@..", status=5)
    assert named(told["restored"]) == ["a@1", "a@3"]
    assert [(one["step"], one["kind"], one["why"]) for one in told["failed"]] == [
        (2, "conflict", "somebody else was first")
    ]
    assert "not restored: a@2" in run("restore", saved, "a@..", status=5).stdout


def test_a_tagged_checkpoint_is_forgotten_only_with_the_tagged_option(saved: Path, as_json: AsJson) -> None:
    as_json("tag", saved, "best", "a@2")
    assert as_json("forget", saved, "a@1..3", status=5)["error"]["kind"] == "conflict"
    assert len(as_json("list", saved)) == 4
    assert len(as_json("forget", saved, "a@1..3", "--tagged")["forgotten"]) == 3
