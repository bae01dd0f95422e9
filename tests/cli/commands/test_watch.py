from __future__ import annotations

import json
from pathlib import Path

import casckpt
from tests.cli.conftest import Run

BRIEF = {"id", "run", "step"}


def test_watch_prints_a_line_for_each_checkpoint(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.forget("a@2")
    for options, steps in (["--after", "start"], [1, 3]), (["--after", "a@1"], [3]), ([], []):
        lines = run("watch", saved, "a", "--timeout", 0, "--json", *options).stdout.splitlines()
        assert [json.loads(line)["step"] for line in lines] == steps
    (line,) = run("watch", saved, "a", "--timeout", 0, "--after", "start", "--latest-only").stdout.splitlines()
    assert line.endswith(f"  a@3 ({store.get('a@3').id[:12]})")
    store.restore(store.checkpoints(forgotten=True)[1])
    row = json.loads(run("watch", saved, "a", "--timeout", 0, "--after", "a@1", "--json").stdout.splitlines()[0])
    assert {*BRIEF, "created_at", "stats", "metrics", "healthy", "late"} <= set(row)
    assert (row["step"], row["late"]) == (2, False)


def test_watch_rejects_contradictory_options(saved: Path, tmp_path: Path, run: Run) -> None:
    assert run("watch", tmp_path / "none", "a", "--timeout", 0).stdout == ""
    assert "error" in run("watch", saved, "a", "--after", "a@9", "--json", status=3).stdout
    run("watch", saved, "a", "--after", "b@1", status=1)
    run("watch", saved, "a", "--poll", "10ms", status=2)
    run("watch", saved, status=2)


def test_follow_keeps_the_newest_checkpoint_in_a_folder(
    saved: Path, store: casckpt.Store, tmp_path: Path, run: Run
) -> None:
    into = ["follow", saved, "a", "--to", tmp_path / "to", "--once"]
    row = json.loads(run(*into, "--json").stdout)
    assert (row["id"], row["status"]) == (store.get("a@3").id, None)
    assert Path(row["folder"]) == (tmp_path / "to" / "current").resolve()
    assert run(*into).stdout == ""
    run("follow", saved, "a", "--to", saved, "--once", status=1)
