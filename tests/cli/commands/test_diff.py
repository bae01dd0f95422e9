from __future__ import annotations

from pathlib import Path

import casckpt
from tests.cli.conftest import AsJson, Run

# looking


def test_diff_prints_keys_and_bytes(saved: Path, as_json: AsJson, run: Run) -> None:
    found = as_json("diff", saved, "a@1", "a@3")
    assert {name: found[name] for name in ("added", "removed", "changed", "unchanged")} == {
        "added": [], "removed": [], "changed": ["own"], "unchanged": ["shared"],
    }  # fmt: skip
    assert found["bytes_changed"] == 4000
    found = as_json("diff", saved, "a@1", "b@1")
    assert (found["added"], found["removed"], found["bytes_added"]) == (["other"], ["own"], 12)
    assert "~ own  bytes, 3.9 KiB" in run("diff", saved, "a@1", "a@3").stdout


# lists


def test_diff_of_one_checkpoint_compares_with_its_parent(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    found = as_json("diff", saved, "a@3")
    assert (found["old"]["step"], found["new"]["step"], found["changed"]) == (2, 3, ["own"])
    assert "a@1 has no parent" in run("diff", saved, "a@1", status=3).stderr
    store.forget("a@1", "a@2")
    store.gc(min_age=0)
    assert "is gone; name another checkpoint" in run("diff", saved, "a@3", status=3).stderr
