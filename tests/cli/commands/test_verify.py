from __future__ import annotations

from pathlib import Path

import casckpt
from casckpt.cli.commands.verify import needed
from tests.cli.conftest import AsJson, Run
from tests.support.commands import damage


def test_verify_counts_and_finds_damage(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    sound = as_json("verify", saved)
    assert sound["damaged"] == []
    assert sound["checked_blobs"] == as_json("stats", saved)["blobs"]
    assert sound["checked_bytes"] == as_json("stats", saved)["bytes_blobs"]
    blob = damage(saved)
    assert as_json("verify", saved, "--quick")["damaged"] == []
    found = as_json("verify", saved, status=4)
    (one,) = found["damaged"]
    assert one["blob"] == blob
    assert "shared" in one["keys"]
    assert set(one["checkpoints"]) == {checkpoint.id for checkpoint in store.checkpoints()}
    assert [(its["run"], its["step"]) for its in one["needed_by"]] == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    text = run("verify", saved, status=4).stdout
    assert blob in text
    assert "  needed by a@1, a@2, a@3, b@1: shared" in text
    assert text.splitlines()[-1] == "1 damaged: run `casckpt repair`"


def test_verify_names_a_few_of_many_affected_checkpoints() -> None:
    needed_by = [{"id": "f" * 64, "run": "a", "step": step} for step in range(2000)]
    assert needed({"keys": ["w"], "needed_by": needed_by}) == (
        "needed by a@0, a@1, a@2, a@3, a@4, ... and 1995 more (--json lists all): w"
    )


def test_known_damage_is_reported_again(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("stats", saved)["damaged_blobs"] == 0
    assert "damaged" not in run("stats", saved).output
    blob = damage(saved)
    run("verify", saved, status=4)
    assert as_json("stats", saved)["damaged_blobs"] == 1
    assert "damaged      1 blob: `casckpt repair`" in run("stats", saved).output
    assert [one["blob"] for one in as_json("verify", saved, "--quick", status=4)["damaged"]] == [blob]
    run("forget", saved, "a@1..3", "b@1")
    run("gc", saved, "--min-age", "0")
    assert as_json("stats", saved)["damaged_blobs"] == 0


def test_verify_checks_chosen_checkpoints(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("verify", saved, "b@1")["checked_checkpoints"] == 1
    said = run("verify", saved, "--sample", "0.01").output.splitlines()
    assert said[0].startswith(f"checked 1 of {as_json('stats', saved)['blobs']} blobs, ")
    assert "checkpoint" not in said[0]
    assert said[1] == "what was checked is well"
    assert as_json("verify", saved, "--sample", "0.01")["checked_blobs"] == 1
    as_json("verify", saved, "--sample", "0", status=2)
    as_json("verify", saved, "c@1", status=3)
