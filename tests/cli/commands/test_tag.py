from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import casckpt
from tests.cli.conftest import AsJson, Run, named


def test_tags_are_set_listed_moved_and_deleted(saved: Path, as_json: AsJson) -> None:
    first = as_json("tag", saved, "best", "a@1")
    assert (first["name"], named([first])) == ("best", ["a@1"])
    as_json("tag", saved, "best", "a@2")
    as_json("tag", saved, "old", "b@1")
    assert [(tag["name"], *named([tag])) for tag in as_json("tag", saved)] == [("best", "a@2"), ("old", "b@1")]
    assert len(as_json("tag", saved, "best")) == 1
    assert as_json("tag", saved, "--delete", "old") == {"deleted": "old"}
    assert as_json("tag", saved, "--delete", "old", status=3)["error"]["kind"] == "not-found"
    as_json("tag", saved, "old", status=3)
    as_json("tag", saved, "Not Usable", "a@1", status=1)
    as_json("tag", saved, "x", "--delete", "best", status=2)


def test_the_list_of_tags_shows_when_a_lease_expires_and_who_holds_it(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    assert "no tags" in run("tag", saved).stdout
    assert as_json("tag", saved) == []
    as_json("tag", saved, "best", "a@2")
    first = as_json("tag", saved, "eval", "a@1", "--expires", "12h")
    until = datetime.fromisoformat(first["expires"]) - datetime.now(UTC)
    assert timedelta(hours=11) < until <= timedelta(hours=12)
    with store.lease("b@1"):
        best, ends, lease = as_json("tag", saved)
        assert (best["name"], best["expires"], *named([best])) == ("best", None, "a@2")
        assert ends == first
        assert lease["name"].startswith("lease-")
        assert named([lease]) == ["b@1"]
        assert all(int(tag["holder"].rpartition(":")[2]) == os.getpid() for tag in (best, ends, lease))
        lines = run("tag", saved).stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["NAME", "best", "eval", lease["name"]]
        assert as_json("gc", saved)["waiting"] == []
    assert len(as_json("tag", saved)) == 2
    assert "UNTIL (UTC)" in run("tag", saved, "eval").stdout
    assert "error" in as_json("tag", saved / "nothing", status=3)
    as_json("tag", saved, "eval", "--expires", "1h", status=2)
    as_json("tag", saved, "eval", "a@1", "--expires", "12", status=2)
    as_json("tag", saved, "eval", "a@1", "--expires", "0", status=1)
    as_json("tag", saved, "--delete", "eval")
    store.forget("a@3")
    gone = as_json("list", saved, "--all")[2]["id"]
    assert as_json("tag", saved, "eval", gone, "--expires", "1h", status=3)["error"]["kind"] == "not-found"
