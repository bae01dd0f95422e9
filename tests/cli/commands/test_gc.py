from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import casckpt
from casckpt.errors import StorageError
from casckpt.history.commits import forget
from casckpt.history.transactions import begin
from casckpt.storage.local.store import LocalStore
from tests.cli.conftest import AsJson, Run, named


def test_gc_restores_forgotten_checkpoints_that_are_tagged(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    store.tag("best", "a@2")
    forget(store.repository, store.get("a@2").commit)  # as a killed gc leaves it
    assert "would restore a@2" in run("gc", saved, "--dry-run").stdout
    assert named(as_json("gc", saved)["restored"]) == ["a@2"]
    assert "a@2" in run("show", saved, "tag:best").stdout


def test_gc_does_what_its_dry_run_reported(saved: Path, as_json: AsJson, run: Run) -> None:
    planned = as_json("gc", saved, "--keep-last", 1, "--min-age", 0, "--dry-run")
    before = set(saved.rglob("*"))
    assert planned["dry_run"] is True
    assert named(planned["forgotten"]) == named(planned["purged"]) == ["a@1", "a@2"]
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1"]
    assert before == set(saved.rglob("*"))
    done = as_json("gc", saved, "--keep-last", 1, "--min-age", 0)
    counts = ("deleted_blobs", "deleted_bytes", "kept_blobs", "kept_bytes")
    assert {name: done[name] for name in counts} == {name: planned[name] for name in counts}
    assert done["deleted_blobs"] > 0
    assert done["waiting"] == []
    assert named(as_json("list", saved, "--all")) == ["a@3", "b@1"]
    assert "deleted 0 blobs" in run("gc", saved).stdout
    as_json("verify", saved)


def test_gc_says_why_each_checkpoint_stays_and_counts_runs(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    store.tag("best", "a@1")
    rule = ("gc", saved, "--keep-last", 1, "--keep-every", 3, "--dry-run")
    newest = ["newest", "keep-last 1"]
    assert as_json(*rule)["kept"] == {"a@1": ["tag best"], "a@3": [*newest, "keep-every 3"], "b@1": newest}
    told = run(*rule).stdout
    assert "kept a@1: tag best\n" in told
    assert "3 checkpoints of 2 runs stay\n" in told
    assert as_json(*rule, "--run", "a")["kept"].keys() == {"a@1", "a@3"}
    told = run("gc", saved).stdout
    assert "4 checkpoints of 2 runs stay\n" in told
    assert "kept a@" not in told


def test_gc_applies_rules_to_the_runs_that_match_a_pattern(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    for name in ("b", "sweep/1", "sweep/2"):
        for step in (8, 9):
            store.save({"w": step}, run=name, step=step)
    rule = ("gc", saved, "--keep-last", 1, "--dry-run")
    assert named(as_json(*rule, "--run", "sweep/?", "--run", "b")["forgotten"]) == [
        "b@1",
        "b@8",
        "sweep/1@8",
        "sweep/2@8",
    ]
    assert named(as_json(*rule, "--run", "s*p/*")["forgotten"]) == ["sweep/1@8", "sweep/2@8"]
    assert [one.step for one in store.gc(run=["[ab]"], keep_last=1, dry_run=True).forgotten] == [1, 2, 1, 8]
    assert store.gc(run=[], keep_last=1, dry_run=True).forgotten == (), "an empty list does not mean all runs"


def test_gc_does_the_runs_that_match_and_fails_for_a_pattern_that_matches_none(
    saved: Path, as_json: AsJson, run: Run
) -> None:
    rule = ("gc", saved, "--keep-last", 2, "--run", "a*", "--run", "nix*", "--run", "b")
    done = as_json(*rule, status=1)
    assert (named(done["forgotten"]), done["unmatched"]) == (["a@1"], ["nix*"])
    assert "no checkpoint of run 'nix*'" in run(*rule, status=1).stderr
    assert as_json("gc", saved, "--run", "a*")["unmatched"] == []
    assert "does not begin with '-': --dry-run" in run("gc", saved, "--run", "--dry-run", status=2).stderr


def test_a_run_without_any_metric_is_trimmed_by_the_other_rule(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    for step in (1, 2, 3):
        store.save({"w": step}, run="c", step=step, metrics={"loss": step})
        store.save({"w": step}, run="d", step=step, metrics={"acc": step})
    rule = ("gc", saved, "--keep-best", "loss:1", "--keep-last", 1, "--dry-run")
    assert named(as_json(*rule)["forgotten"]) == ["a@1", "a@2", "c@2"]
    told = run(*rule).stderr
    assert "no checkpoint of run d has a number for 'loss', so gc keeps all of them" in told
    assert "no checkpoint of run a, b has any metric, so only the other rules apply" in told
    assert named(as_json(*rule, "--run", "a")["forgotten"]) == ["a@1", "a@2"]
    stays = run("thin", saved, "--drop", "w", "--keep-best", "loss:1", "--keep-last", 1, status=3).stderr
    assert "no checkpoint of run a, b, d has a number for 'loss', so gc keeps all of them" in stays


def test_gc_forgets_nothing_without_a_rule(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("gc", saved)["forgotten"] == []
    assert named(as_json("gc", saved, "--keep-every", 2, "--run", "a", "--dry-run")["forgotten"]) == ["a@1"]
    assert as_json("gc", saved, "--keep-within", "7d", "--dry-run")["forgotten"] == []
    for bare in ("soon", "7", "0.5", "-7d"):
        as_json("gc", saved, "--keep-within", bare, status=2)
    assert "pass 7s or 7d if you mean that" in run("gc", saved, "--keep-within", "7", status=2).stderr
    for bare in ("loss", "loss:0", ":3"):
        assert 'as "loss:3"' in as_json("gc", saved, "--keep-best", bare, status=2)["error"]["message"]
    as_json("gc", saved, "--keep-last", 0, status=1)


def test_gc_reports_deferred_checkpoints_and_when_it_will_purge_them(saved: Path, as_json: AsJson, run: Run) -> None:
    done = as_json("gc", saved, "--keep-last", 1, "--min-age", "1h")
    assert (len(done["forgotten"]), done["purged"]) == (2, [])
    assert [(one["reason"], *named([one])) for one in done["waiting"]] == [("young", "a@1"), ("young", "a@2")]
    assert datetime.fromisoformat(done["waiting"][0]["until"]) > datetime.now(UTC)
    assert "left for later: a@1" in run("gc", saved, "--min-age", "1h").stdout


def test_a_checkpoint_forgotten_by_a_rule_can_be_restored_for_a_day(saved: Path, as_json: AsJson, run: Run) -> None:
    """The plan, the list and the totals show when gc purges it and how many bytes it then frees."""
    planned = as_json("gc", saved, "--keep-last", 1, "--dry-run")
    told = run("gc", saved, "--keep-last", 1).stdout
    assert told.count("forgot a@") == told.count(", can be restored until ") == 2
    assert "1 blob, " in told
    assert "will be deleted once" in told
    day = datetime.fromisoformat(planned["waiting"][0]["until"]) - datetime.now(UTC)
    assert day > timedelta(hours=23)
    stats, listed = as_json("stats", saved), run("list", saved)
    assert (stats["bytes_freed_now"], stats["bytes_freed_later"]) == (0, planned["later_bytes"])
    assert planned["later_bytes"] > 0
    assert "2 checkpoints forgotten (--all lists them): `casckpt stats` shows" in listed.stderr
    assert "2 checkpoints forgotten: `casckpt stats` shows" in run("list", saved, "--all").stderr
    assert "forgotten" not in listed.stdout, "a pipe gets rows alone"
    assert as_json("report", saved)["freed"] == {"now": 0, "later": planned["later_bytes"]}
    for one in planned["forgotten"]:
        as_json("restore", saved, one["id"])
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1"]
    assert "forgotten" not in run("list", saved).output


def test_gc_reports_the_process_that_it_waits_for(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    transaction = begin(store.repository, "a", 4)
    done = as_json("gc", saved, "--keep-last", 1, "--min-age", 0, "--wait", 0)
    (waiting,) = done["waiting"]
    assert (waiting["reason"], waiting["txid"], waiting["pid"]) == ("transaction", transaction.txid, os.getpid())
    assert done["deleted_blobs"] == 0
    result = run("gc", saved, "--wait", "0.01s")
    assert f"process {os.getpid()}" in result.stdout
    assert result.stderr.count("waiting for the save of a@4") == 1
    transaction.abort("test")
    assert as_json("gc", saved)["deleted_blobs"] > 0


def test_gc_with_an_unreadable_manifest_changes_nothing(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    next(saved.glob(f"objects/*/{store.get('a@3').id}.manifest")).unlink()
    rule = ("gc", saved, "--keep-last", 1, "--min-age", 0)
    for options in (["--dry-run"], []):
        error = as_json(*rule, *options, status=4)["error"]
        assert (error["kind"], "before this error" in error["message"]) == ("damaged", False)
        told = run(*rule, *options, status=4)
        assert (told.stdout, "gc deletes nothing" in told.stderr) == ("", True)
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1"]


def test_an_interrupted_gc_reports_forgotten_and_purged_checkpoints(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("casckpt.cli.commands.gc._WaitReport.__call__", interrupt)
    transaction = begin(store.repository, "a", 4)
    done = as_json("gc", saved, "--keep-last", 2, "--min-age", 0, status=130)
    assert done["error"]["kind"] == "interrupted"
    assert re.search(r"gc had forgotten a@1.*; purged a@1.*; restored nothing", done["error"]["message"])
    told = run("gc", saved, "--keep-last", 1, status=130).stderr
    assert "casckpt: interrupted\nbefore this error, gc had forgotten a@2" in told
    transaction.abort("test")


def test_restore_undoes_thinning(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    key = next(iter(store.get("a@1").tensors))
    planned = as_json("thin", saved, "a@1", "--drop", key, "--dry-run")
    assert (planned["dry_run"], planned["entries"], named(planned["thinned"])) == (True, 1, ["a@1"])
    assert as_json("show", saved, "a@1")["dropped"] is None
    typo = run("thin", saved, "--drop", key, "--keep-last", 2, "--run", "typo*", status=1)
    assert "no checkpoint of run 'typo*'" in typo.stderr
    text = run("thin", saved, "--drop", key, "--keep-last", 2).stdout
    assert "thinned a@1" in text
    assert "freed by a gc after" in text
    assert [bool(row["dropped"]) for row in as_json("list", saved)] == [True, False, False, False]
    assert " thin" in run("list", saved).stdout
    assert f"by --drop {key}" in run("show", saved, "a@1").stdout
    assert named(as_json("restore", saved, "--whole", "a@1")["restored"]) == ["a@1"]
    assert as_json("show", saved, "a@1")["dropped"] is None
    assert as_json("thin", saved, "a@1", "--drop", "nothing", status=3)["error"]["kind"] == "missing-key"
    assert (
        "specify either the checkpoints to thin" in as_json("thin", saved, "--drop", key, status=1)["error"]["message"]
    )


def test_gc_names_files_of_other_users_and_exits_with_1(
    saved: Path, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(storage: LocalStore, key: str) -> None:
        path = str(storage.path / key)
        raise StorageError(f"cannot delete {path}: permission denied", path=path, refused=True)

    monkeypatch.setattr(LocalStore, "delete", refuse)
    done = as_json("gc", saved, "--run", "a", "--keep-last", 1, "--min-age", 0, status=1)
    assert named(done["purged"]) == ["a@1", "a@2"]
    assert done["deleted_blobs"] == 0
    assert {(one["run"], one["owner"], Path(one["path"]).is_file()) for one in done["refused"]} == {
        ("a", saved.owner(), True)
    }
    assert "refused: cannot delete" in run("gc", saved, status=1).stdout
    monkeypatch.undo()
    blobs = [one for one in done["refused"] if one["path"].endswith(".safetensors")]
    assert as_json("gc", saved)["deleted_blobs"] == len(blobs) > 0


def test_min_age_below_the_setting_is_refused_by_name(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.change_settings(min_age="7d")
    refused = run("gc", saved, "--keep-last", 1, "--min-age", 0, status=1).stderr
    assert "min-age: 0 is less than the store's setting min_age (7d): pass at least that" in refused
    assert store.checkpoints(forgotten=True) == store.checkpoints()
    assert "can be restored until" in run("gc", saved, "--keep-last", 1, "--min-age", "2w").stdout
