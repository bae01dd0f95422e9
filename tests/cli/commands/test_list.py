from __future__ import annotations

import math
import os
import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.history import commits
from casckpt.history.tags import write_generation
from casckpt.history.transactions import begin
from tests.cli.conftest import AsJson, Run, named
from tests.support.commands import STATS
from tests.support.rewrites import move

BRIEF = {"id", "run", "step"}


# reads


def test_list_prints_checkpoints_oldest_first(saved: Path, store: casckpt.Store, as_json: AsJson) -> None:
    store.tag("best", "a@2")
    rows = as_json("list", saved)
    assert named(rows) == ["a@1", "a@2", "a@3", "b@1"]
    assert [row["tags"] for row in rows] == [[], ["best"], [], []]
    for row in rows:
        assert {*BRIEF, "created_at", "bytes_total", "ephemeral", "forgotten", "tags"} <= set(row)
        assert datetime.fromisoformat(row["created_at"]).tzinfo == UTC
        assert (row["ephemeral"], row["forgotten"], row["superseded"]) == (False, False, False)
        assert len(row["id"]) == 64
        assert set(row["stats"]) == STATS
    assert rows[0]["bytes_total"] == 24_000
    assert rows[0]["metadata"] == {"loss": 1.0}
    assert named(as_json("list", saved, "--run", "b")) == ["b@1"]


def test_list_shows_forgotten_checkpoints_only_with_the_option_all(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    store.forget("a@2")
    assert named(as_json("list", saved)) == ["a@1", "a@3", "b@1"]
    rows = as_json("list", saved, "--all")
    assert [(row["step"], row["forgotten"]) for row in rows] == [(1, False), (2, True), (3, False), (1, False)]
    assert "forgotten" in run("list", saved, "--all").stdout


def test_list_and_show_say_who_saved_and_who_forgot_a_checkpoint(
    saved: Path, tmp_path: Path, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob, cid = (f"{user}@{socket.gethostname()}" for user in ("ann", "bob", "cid"))
    monkeypatch.setenv("CASCKPT_USER", "ann")
    casckpt.open(saved).save({"x": 1}, run="c", step=1)
    monkeypatch.setenv("CASCKPT_USER", "bob")
    run("forget", saved, "c@1")
    [row] = as_json("list", saved, "--all", "--run", "c")
    assert (row["who"], row["forgotten_by"]) == (ann, bob)
    assert [ann, f"forgotten by {bob}"] == re.findall(r"\S+@\S+|forgotten by \S+", run("list", saved, "--all").stdout)[
        -2:
    ]
    shown = run("show", saved, row["id"]).stdout
    assert f"UTC, by {ann}, with casckpt" in shown
    assert f"forgotten by {bob}" in shown
    monkeypatch.setenv("CASCKPT_USER", "cid")
    run("restore", saved, row["id"])
    run("copy", saved, tmp_path / "copy", "c@1")
    rows = [as_json("list", store, "--run", "c")[0] for store in (saved, tmp_path / "copy")]
    assert [(row["who"], row["forgotten_by"]) for row in rows] == [(ann, None), (cid, None)]
    assert as_json("tag", tmp_path / "copy", "best", "c@1")["holder"] == f"{cid}:{os.getpid()}"


def test_with_the_option_all_list_shows_replaced_commits_until_gc_removes_them(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    old = store.get("a@2")
    move(store.repository, old.commit)
    assert [row["replaced"] for row in as_json("list", saved)] == [False] * 4
    rows = as_json("list", saved, "--all")
    assert [(row["step"], row["replaced"], row["forgotten"]) for row in rows if row["id"] == old.id] == [
        (2, True, False),
        (2, False, False),
    ]
    assert "replaced" in run("list", saved, "--all").stdout
    assert as_json("show", saved, "a@2")["replaced"] is False
    (waiting,) = as_json("gc", saved)["waiting"]
    assert (waiting["reason"], waiting["id"]) == ("replaced", old.id)
    assert f"left for later: the old locations of a@2 ({old.id[:12]}" in run("gc", saved).stdout
    assert (
        f"would purge the old locations of a@2 ({old.id[:12]}" in run("gc", saved, "--min-age", "0", "--dry-run").stdout
    )
    (purged,) = as_json("gc", saved, "--min-age", "0")["purged"]
    assert purged == {"id": old.id, "run": "a", "step": 2, "replaced": True}
    assert as_json("show", saved, old.id[:16])["run"] == "a"


def test_a_replaced_commit_of_a_visible_checkpoint_is_marked_as_an_old_location(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    key = next(iter(store.get("a@1").tensors))
    for _ in range(2):
        store.thin("a@1", drop=key)
        store.restore("a@1", whole=True)
    run("gc", saved)  # gc ends undone rewrites
    assert [(one["reason"], one["replaced"]) for one in as_json("gc", saved)["waiting"]] == [("replaced", True)] * 2
    lines = run("gc", saved).stdout.splitlines()
    assert [line.partition(" (")[0] for line in lines[2:]] == ["left for later: the old locations of a@1"], "once"
    just_now = round((datetime.now(UTC) - timedelta(minutes=1)).timestamp() * 1e6)
    write_generation(store.repository, "eval", 0, store.get("a@1").commit, expires=just_now)
    store.thin("a@1", drop=key)
    told = run("gc", saved).stdout
    assert "left for later: the old locations of a@1 (" in told
    assert ", tagged eval, until " in told
    assert "forgotten" not in told


def test_list_marks_the_earlier_of_two_twins_as_superseded(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = store.get("a@2")
    new = store.save({"shared": torch.arange(3.0)}, run="a", step=2, overwrite=True)
    # as after a crash between the new commit and the forgetting of the old one
    monkeypatch.setattr("casckpt.history.commits.list_commits", _with_twin(old.commit))
    rows = [row for row in as_json("list", saved) if named([row]) == ["a@2"]]
    assert [(row["id"], row["superseded"]) for row in rows] == [(old.id, True), (new.id, False)]


def _with_twin(twin: Any) -> Any:

    real = commits.list_commits

    def listed(repo: Any) -> Any:
        found = real(repo)
        return commits.CommitList({**found.commits, twin.txid: twin}, found.damaged)

    return listed


# tags and removal


def test_list_shows_metrics(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.save({"w": torch.zeros(1)}, run="m", step=1, metrics={"val": 0.5, "grad": float("nan")}, healthy=False)
    store.save({"w": torch.ones(1)}, run="m", step=2, metrics={"val": 0.25}, healthy=True)
    rows = as_json("list", saved, "--run", "m")
    assert [row["metrics"] for row in rows] == [{"val": 0.5, "grad": "nan"}, {"val": 0.25}]
    assert [row["healthy"] for row in rows] == [False, True]
    assert [row["healthy"] for row in as_json("list", saved, "--run", "b")] == [None]
    text = run("list", saved, "--run", "m", "--show", "val", "--show", "grad").stdout
    assert "VAL" in text
    assert "0.25" in text
    assert text.splitlines()[1].endswith("unhealthy")
    shown = as_json("show", saved, "m@1")
    assert (shown["metrics"], shown["healthy"]) == ({"val": 0.5, "grad": "nan"}, False)
    text = run("show", saved, "m@1").stdout
    assert "val 0.5, grad nan" in text
    assert "unhealthy" in text


def test_list_shows_the_health_that_a_save_recorded(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    tensors = {"a": torch.tensor([1.0, -2.5]), "b": torch.ones(3, dtype=torch.int8)}
    store.save(tensors, run="h", step=1, health=True)
    store.save(tensors | {"a": torch.tensor([math.nan, -math.inf])}, run="h", step=2, health=True)
    rows = as_json("list", saved, "--run", "h")
    assert [row["health"] for row in rows] == [
        {"nan": 0, "inf": 0, "keys": []}, {"nan": 1, "inf": 1, "keys": ["a"]},
    ]  # fmt: skip
    assert [row["health"] for row in as_json("list", saved, "--run", "b")] == [None]
    assert "unhealthy, 1 NaN, 1 infinite" in run("list", saved).output
    sick = {"nan": 1, "inf": 1, "largest": 0.0}
    assert as_json("show", saved, "h@2")["tensors"][0]["health"] == sick
    assert "1 NaN, 1 infinite in a" in run("show", saved, "h@2").output
    assert "no NaN or infinite elements\n" in run("show", saved, "h@1").output
    store.save(tensors, run="f", step=1)
    store.save(tensors, run="f", step=2, health=True, frozen=["a"])
    assert "no NaN or infinite elements; 1 tensor not checked\n" in run("show", saved, "f@2").output


# lists


def test_list_can_limit_its_rows_and_show_metadata_columns(saved: Path, as_json: AsJson, run: Run) -> None:
    assert named(as_json("list", saved, "--limit", 2)) == ["a@3", "b@1"]
    shown = run("ls", saved, "--show", "loss", "--limit", 2).stdout
    assert "LOSS" in shown.splitlines()[0]
    assert "0.3333" in shown.splitlines()[1]


def test_list_shows_values_of_any_kind(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    for step, loss in ((4, "low"), (5, True), (6, None)):
        store.save({}, run="a", step=step, metadata={"loss": loss, "note": {"a": [1]}})
    shown = run("list", saved, "--show", "loss", "--show", "note", "--show", "none").stdout
    assert all(value in shown for value in ("low", "true", "null", '{"a": [1]}'))
    told = run("list", saved, "--show", "los", "--show", "note").stderr
    assert "no listed checkpoint has 'los' in its metrics or metadata; the known names are loss, note" in told
    assert "'note'" not in told


def test_the_transactions_command_lists_and_revokes_transactions(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    assert as_json("transactions", saved) == []
    assert run("transactions", saved).stdout == "no save is in progress\n"
    transaction = begin(store.repository, "a", 4)
    (row,) = as_json("transactions", saved)
    assert (row["txid"], row["run"], row["step"], row["pid"]) == (transaction.txid, "a", 4, os.getpid())
    assert row["alive"] is True
    assert datetime.fromisoformat(row["since"]).tzinfo == UTC
    assert "(alive)" in run("transactions", saved).stdout
    assert as_json("transactions", saved, "--revoke", row["txid"]) == {"revoked": row["txid"]}
    assert as_json("transactions", saved) == []
    assert as_json("transactions", saved, "--revoke", row["txid"], status=5)["error"]["kind"] == "conflict"
    as_json("transactions", saved, "--revoke", "nonsense", status=2)
    as_json("transactions", saved, "--revoke", row["txid"].replace("-4", "-5"), status=3)
    assert transaction.abort("test")


def test_saves_whose_records_were_lost_are_listed_and_revoked(saved: Path, as_json: AsJson, run: Run) -> None:
    (saved / "commits").rename(saved / "away")
    lost = sorted(path.name for path in (saved / "away").iterdir())
    assert "records are missing" in run("gc", saved, "--keep-last", 1, status=4).output
    found = as_json("verify", saved, status=4)["records"]
    assert [row["key"] for row in found] == [f"commits/{txid}" for txid in lost]
    for txid in lost:
        assert as_json("transactions", saved, "--give-up", txid) == {"given_up": txid}
    as_json("transactions", saved, "--give-up", lost[0], status=5)
    assert as_json("verify", saved)["records"] == []
    assert as_json("gc", saved)["deleted_manifests"] == 4
