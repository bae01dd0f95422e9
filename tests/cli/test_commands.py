"""Each command: its JSON fields, its text, and what it does to the store."""

from __future__ import annotations

import enum
import json
import math
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import casckpt
from casckpt.base.sizes import format_size
from casckpt.cli.commands.verify import needed
from casckpt.cli.text import printable
from casckpt.errors import Conflict
from casckpt.history import commits
from casckpt.history.commits import Commit, forget
from casckpt.history.tags import write_generation
from casckpt.history.transactions import begin
from casckpt.repository.repository import Repository
from tests.cli.conftest import AsJson, Run
from tests.support.rewrites import move

BRIEF = {"id", "run", "step"}
STATS = {
    "bytes_total", "bytes_written", "bytes_reused", "bytes_coded", "bytes_frames", "bytes_deltas", "blobs_written",
    "blobs_reused", "seconds",
}  # fmt: skip


def named(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['run']}@{row['step']}" for row in rows]


# looking


def test_list_gives_the_checkpoints_oldest_first(saved: Path, store: casckpt.Store, as_json: AsJson) -> None:
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


def test_list_shows_forgotten_ones_only_with_all(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.forget("a@2")
    assert named(as_json("list", saved)) == ["a@1", "a@3", "b@1"]
    rows = as_json("list", saved, "--all")
    assert [(row["step"], row["forgotten"]) for row in rows] == [(1, False), (2, True), (3, False), (1, False)]
    assert "forgotten" in run("list", saved, "--all").stdout


def test_old_places_are_listed_with_all_and_go_with_a_gc(
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
    assert f"left for later: the old places of a@2 ({old.id[:12]}" in run("gc", saved).stdout
    assert f"would purge the old places of a@2 ({old.id[:12]}" in run("gc", saved, "--min-age", "0", "--dry-run").stdout
    (purged,) = as_json("gc", saved, "--min-age", "0")["purged"]
    assert purged == {"id": old.id, "run": "a", "step": 2, "replaced": True}
    assert as_json("show", saved, old.id[:16])["run"] == "a"


def test_what_waits_of_a_visible_checkpoint_is_called_its_old_places(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    key = next(iter(store.get("a@1").tensors))
    for _ in range(2):
        store.thin("a@1", drop=key)
        store.restore("a@1", whole=True)
    run("gc", saved)  # it ends rewrites that were undone
    assert [(one["reason"], one["replaced"]) for one in as_json("gc", saved)["waiting"]] == [("replaced", True)] * 2
    lines = run("gc", saved).stdout.splitlines()
    assert [line.partition(" (")[0] for line in lines[1:]] == ["left for later: the old places of a@1"], "once"
    just_now = round((datetime.now(UTC) - timedelta(minutes=1)).timestamp() * 1e6)
    write_generation(store.repository, "eval", 0, store.get("a@1").commit, expires=just_now)
    store.thin("a@1", drop=key)
    told = run("gc", saved).stdout
    assert "left for later: the old places of a@1 (" in told
    assert ", tagged eval, until " in told
    assert "forgotten" not in told


def test_what_was_rewritten_is_had_back(store: casckpt.Store, saved: Path) -> None:
    old = store.get("a@2")
    move(store.repository, old.commit)
    assert store.restore(old) == store.get("a@2") != old, "it is visible, wherever it lies"
    (replaced,) = (one for one in store.checkpoints(forgotten=True) if one.replaced)
    assert store.restore(replaced) == store.get("a@2") == old
    assert not [one for one in store.checkpoints(forgotten=True) if one.replaced]
    assert len(store.checkpoints()) == 4


def test_a_run_that_is_not_there_is_told_of_with_those_that_are(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.save({"w": torch.zeros(1)}, run="pretrain", step=1)
    for command in ("list", "gc"):
        found = run(command, saved, "--run", "pretrian", "--json")
        assert json.loads(found.stdout) is not None
        assert "there is no checkpoint of run 'pretrian' in" in found.stderr
        assert "did you mean pretrain?" in found.stderr
        assert "there is no checkpoint" not in run(command, saved, "--run", "a").stderr
    store.forget("b@1")
    found = run("list", saved, "--run", "b")
    assert "1 of it was forgotten: see `casckpt list --all`" in found.stderr
    assert found.stdout == "no checkpoints\n"
    assert not run("list", saved, "--run", "b", "--all").stderr
    assert not run("gc", saved, "--run", "b").stderr


def test_list_shows_twins_as_superseded(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = store.get("a@2")
    new = store.save({"shared": torch.arange(3.0)}, run="a", step=2, overwrite=True)
    # as a crash between the new commit and the forgetting of the old one would leave it
    monkeypatch.setattr("casckpt.history.commits.list_commits", _with_twin(old.commit))
    rows = [row for row in as_json("list", saved) if named([row]) == ["a@2"]]
    assert [(row["id"], row["superseded"]) for row in rows] == [(old.id, True), (new.id, False)]


def _with_twin(twin: Any) -> Any:
    from casckpt.history import commits

    real = commits.list_commits

    def listed(repo: Any) -> Any:
        found = real(repo)
        return commits.CommitList({**found.commits, twin.txid: twin}, found.damaged)

    return listed


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_tables_fit_into_a_terminal(
    saved: Path, store: casckpt.Store, run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("casckpt.cli.text.terminal_width", lambda: columns)
    long = "a-rather-long-name/of-a-run/that-somebody-chose/for-some-good-reason"
    store.save({"a" * 100: torch.zeros(2)}, run=long, step=123456789, ephemeral=True)
    store.tag("a-tag-with-a-rather-long-name", "latest")
    for command in (("list", saved), ("show", saved, "latest", "--tensors"), ("report", saved)):
        lines = run(*command).stdout.splitlines()
        table = [line for line in lines if command[0] != "show" or "float32" in line]
        assert max(map(len, table)) <= columns
        assert [line for line in lines if line != line.rstrip()] == []


def test_a_store_cannot_talk_to_the_terminal(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.save({"evil\x1b[2J\n[red]key": torch.zeros(2)}, run="evil", step=1, metadata={"x": "\x1b[31m"})
    for command in ("show", "diff"):
        shown = run(command, saved, "evil@1", *(["a@1"] if command == "diff" else [])).stdout
        assert "\x1b" not in shown
        assert r"evil\x1b[2J\n[red]key" in shown.replace("\n", "")
    assert printable("a\tb\u202e\n") == r"a\tb\u202e\n"


def test_show_gives_details_and_tensors(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.tag("best", "b@1")
    shown = as_json("show", saved, "tag:best")
    assert named([shown]) == ["b@1"]
    assert shown["id"] == store.get("b@1").id
    assert set(shown["stats"]) == STATS
    assert shown["tensors"] == [
        {"key": "shared", "dtype": "float32", "shape": [5000], "bytes": 20_000, "health": None},
        {"key": "other", "dtype": "bfloat16", "shape": [2, 3], "bytes": 12, "health": None},
    ]
    assert shown["tags"] == ["best"]
    assert as_json("show", saved, "a@1")["objects"] == ["lr"]
    text = run("show", saved, "b@1").stdout
    assert "bfloat16" in text
    assert "2x3" in text


def test_json_has_null_for_what_is_no_number(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.save({"a": torch.zeros(1)}, run="n", step=0, metadata={"loss": float("nan"), "all": [float("inf"), 1.5]})
    for command in (("show", saved, "n@0"), ("list", saved)):
        assert "NaN" not in run(*command, "--json").stdout
    assert json.loads(run("show", saved, "n@0", "--json").stdout)["metadata"] == {"loss": None, "all": [None, 1.5]}


def test_show_says_what_is_pickled(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.save({"odd": Odd(1), "n": 1}, run="odd", step=1, allow_pickle=True)
    assert as_json("show", saved, "odd@1")["pickled"] == ["odd"]
    assert "pickled  odd" in run("show", saved, "odd@1").stdout
    assert as_json("show", saved, "a@1")["pickled"] == []
    assert "pickled" not in run("show", saved, "a@1").stdout


class Odd(enum.IntEnum):
    ONE = 1


def test_show_chooses_by_key(saved: Path, as_json: AsJson, run: Run) -> None:
    assert [one["key"] for one in as_json("show", saved, "a@1", "--keys", "o*")["tensors"]] == ["own"]
    assert as_json("show", saved, "a@1", "--keys", "x*", status=3)["error"]["kind"] == "missing-key"


def test_show_does_not_list_many_tensors_unasked(store: casckpt.Store, store_path: Path, run: Run) -> None:
    store.save({f"k{number}": torch.zeros(1) for number in range(30)}, step=0)
    assert "k17" not in run("show", store_path, "latest").stdout
    assert "k17" in run("show", store_path, "latest", "--tensors").stdout


def test_diff_gives_keys_and_bytes(saved: Path, as_json: AsJson, run: Run) -> None:
    found = as_json("diff", saved, "a@1", "a@3")
    assert {name: found[name] for name in ("added", "removed", "changed", "unchanged")} == {
        "added": [], "removed": [], "changed": ["own"], "unchanged": ["shared"],
    }  # fmt: skip
    assert found["bytes_changed"] == 4000
    found = as_json("diff", saved, "a@1", "b@1")
    assert (found["added"], found["removed"], found["bytes_added"]) == (["other"], ["own"], 12)
    assert "~ own  bytes, 3.9 KiB" in run("diff", saved, "a@1", "a@3").stdout


def test_stats_say_what_holds_the_bytes(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.tag("best", "b@1")
    found = as_json("stats", saved, "--by", "run", "--by", "step", "--by", "key", "--by", "tag", "--keep-last", "1")
    assert {*as_json("stats", saved)} == {*found} - {
        "by_run", "by_step", "by_key", "by_tag", "rules", "unreadable",
    }  # fmt: skip
    assert [one["run"] for one in found["by_run"]] == [one["run"] for one in as_json("report", saved)["runs"]]
    assert sum(one["bytes_new"] for one in found["by_step"]) == found["bytes_blobs"]
    assert sum(one["bytes_blobs"] for one in found["by_key"]) == pytest.approx(found["bytes_blobs"], abs=9)
    assert [(one["name"], one["run"], one["step"]) for one in found["by_tag"]] == [("best", "b", 1)]
    assert [one["rule"] for one in found["rules"]] == ["keep-last 1"]
    text = run("stats", saved, "--by", "step", "--by", "key", "--by", "tag", "--run", "b", "--keep-last", "1").stdout
    assert all(word in text for word in ("ALONE", "best", "shared.*", "keep-last 1"))
    assert {one["run"] for one in as_json("stats", saved, "--by", "run", "--run", "b")["by_run"]} == {"b"}


def test_stats_count(saved: Path, as_json: AsJson) -> None:
    found = as_json("stats", saved)
    blobs = list(saved.glob("objects/*/*.safetensors"))
    files = [*blobs, *saved.glob("objects/*/*.manifest")]
    assert (found["checkpoints"], found["blobs"]) == (4, len(blobs))
    assert found["bytes_stored"] == sum(path.stat().st_size for path in files)
    assert found["bytes_logical"] == 3 * 24_000 + 20_012


def test_what_is_stored_smaller_is_told(store: casckpt.Store, store_path: Path, as_json: AsJson, run: Run) -> None:
    weights = torch.linspace(1, 2, 8192, dtype=torch.bfloat16)
    store.save({"w": weights}, run="r", step=1)
    assert "smaller" not in run("stats", store_path).stdout + run("show", store_path, "r@1").stdout
    store.save({"w": weights + 0.5}, run="r", step=2, compress="always")
    found, shown = as_json("stats", store_path), as_json("show", store_path, "r@2")["stats"]
    for told in (found, shown):
        assert told["bytes_coded"] == weights.nbytes
        assert 0 < told["bytes_deltas"] <= told["bytes_frames"] < weights.nbytes
    line = f"16.0 KiB in {format_size(found['bytes_frames'])}, {format_size(found['bytes_deltas'])} of it deltas"
    assert all(line in run(*args).stdout for args in (("stats", store_path), ("show", store_path, "r@2")))
    assert as_json("verify", store_path, "--decode")["decoded_bytes"] > weights.nbytes
    assert "decoded 32.0 KiB" in run("verify", store_path, "--decode").stdout


def test_report_tells_where_the_bytes_are(saved: Path, as_json: AsJson, run: Run) -> None:
    found = as_json("report", saved)
    first, second = found["runs"]
    assert (first["run"], first["checkpoints"], first["newest_step"]) == ("a", 3, 3)
    assert (second["run"], second["checkpoints"]) == ("b", 1)
    assert datetime.fromisoformat(first["newest_at"]).tzinfo is not None
    assert first["bytes_alone"] + second["bytes_alone"] + found["bytes_shared"] == found["bytes_blobs"]
    assert found["bytes_blobs"] == sum(path.stat().st_size for path in saved.glob("objects/*/*.safetensors"))
    lines = run("report", saved).stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["RUN", "a", "b"]


# in and out


def test_init_makes_a_store_with_its_sizes_once(store_path: Path, as_json: AsJson, run: Run) -> None:
    made = as_json("init", store_path, "--cell-size", "64KiB", "--blob-size", "4MiB")
    assert (made["cell_bytes"], made["blob_bytes"]) == (64 << 10, 4 << 20)
    assert casckpt.open(store_path).repository.marker.store_id == made["store_id"]
    assert as_json("init", store_path, status=5)["error"]["kind"] == "conflict"
    assert "not a size" in run("init", store_path, "--cell-size", "big", status=2).stderr


def test_import_and_export_give_the_same_file(store_path: Path, tmp_path: Path, as_json: AsJson) -> None:
    source, out = tmp_path / "m.safetensors", tmp_path / "o.safetensors"
    safetensors.torch.save_file({"a": torch.randn(100), "b": torch.ones(3).bfloat16()}, source)
    made = as_json("import", store_path, source, "--run", "base", "--step", 0)
    assert {*BRIEF, "stats"} <= set(made)
    assert made["stats"]["bytes_written"] > 0
    assert as_json("import", store_path, source, "--run", "base", "--step", 1)["stats"]["bytes_written"] == 0
    assert as_json("import", store_path, source, "--run", "base", "--step", 1, status=5)["error"]["kind"] == "conflict"
    as_json("import", store_path, source, "--run", "base", "--step", 1, "--overwrite")
    found = as_json("export", store_path, "base@1", out, "--format", "safetensors")
    assert (found["files"], found["tensors"]) == ([str(out)], 2)
    assert out.read_bytes() == source.read_bytes()
    assert as_json("export", store_path, "base@1", out, status=5)["error"]["kind"] == "conflict"
    as_json("export", store_path, "base@1", out, "--force", "--keys", "a")
    assert list(safetensors.torch.load_file(out)) == ["a"]


def test_export_says_what_it_leaves_out(saved: Path, tmp_path: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("export", saved, "a@1", tmp_path / "out", "--max-shard-size", "10KB")["left_out"] == ["lr"]
    assert len(list((tmp_path / "out").glob("model-0000?-of-00002.safetensors"))) == 2
    assert "not REGEX=NAME" in run("export", saved, "a@1", tmp_path / "x", "--rename", "w", status=2).stderr
    assert "left out: lr\n" in run("export", saved, "a@1", tmp_path / "again").stdout


def test_import_tells_what_it_did_not_translate(store_path: Path, tmp_path: Path, run: Run) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    torch.save({"optimizer": torch.optim.SGD([weight]).state_dict()}, tmp_path / "ckpt.pt")
    result = run("import", store_path, tmp_path / "ckpt.pt", "--step", 1, "--json")
    assert "counts its parameters" in json.loads(result.stdout)["notes"][0]
    assert "counts its parameters" in result.stderr
    run("import", store_path, tmp_path / "ckpt.pt", "--step", 2, "--as-is")


def test_import_says_what_a_file_is_instead(store_path: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin itself" in run("import", store_path, tmp_path, "--step", 0, status=1).stderr
    assert "no file" in run("import", store_path, tmp_path / "absent", "--step", 0, status=3).stderr
    assert "'' names no file" in run("import", store_path, "", "--step", 0, status=1).stderr
    too_long = run("import", store_path, "x" * 300, "--step", 0, status=1).stderr
    assert "cannot read xxx" in too_long  # as with whatever else the operating system refuses
    assert "too long" in too_long
    assert not store_path.exists()


def test_files_and_folders_of_torch_go_in_and_out(store_path: Path, tmp_path: Path, run: Run, as_json: AsJson) -> None:
    torch.save({"a": torch.ones(2), "n": 3}, tmp_path / "in.pt")
    made = as_json("import", store_path, tmp_path / "in.pt", "--step", 0)
    assert (made["kind"], made["step"], made["files"]) == ("torch", 0, [str(tmp_path / "in.pt")])
    found = as_json("export", store_path, "default@0", tmp_path / "out", "--format", "dcp")
    assert (found["format"], found["tensors"], found["left_out"]) == ("dcp", 1, [])
    assert sorted(Path(name).name for name in found["files"]) == [".metadata", "__0_0.distcp"]
    (tmp_path / "out" / "mine").touch()
    again = as_json("export", store_path, "default@0", tmp_path / "out", "--format", "dcp", "--force")
    assert again["files"] == found["files"]
    assert as_json("import", store_path, tmp_path / "out", "--step", 1)["kind"] == "dcp"
    found = as_json("export", store_path, "default@1", tmp_path / "out.pt", "--format", "torch")
    assert found["files"] == [str(tmp_path / "out.pt")]
    assert torch.load(tmp_path / "out.pt")["n"] == 3
    run("export", store_path, "default@1", tmp_path / "out.pt", "--format", "torch", status=5)
    for kind, option, given in (("dcp", "--keys", "a"), ("torch", "--max-shard-size", "1GB")):
        told = run("export", store_path, "default@1", tmp_path / "x", "--format", kind, option, given, status=1)
        assert f"{option} is for hf and safetensors" in told.stderr
    assert not (tmp_path / "x").exists()
    torch.save({"s": slice(0)}, tmp_path / "odd.pt")
    refused = run("import", store_path, tmp_path / "odd.pt", "--step", 2, status=1).stderr
    assert "--allow-pickle" in refused
    assert refused.endswith("slice)\n")
    run("import", store_path, tmp_path / "odd.pt", "--step", 2, "--allow-pickle")


# keeping and removing


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


def test_tags_tells_until_when_and_who(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    assert "no tags" in run("tags", saved).stdout
    assert as_json("tags", saved) == []
    as_json("tag", saved, "best", "a@2")
    first = as_json("tag", saved, "eval", "a@1", "--expires", "12h")
    until = datetime.fromisoformat(first["expires"]) - datetime.now(UTC)
    assert timedelta(hours=11) < until <= timedelta(hours=12)
    with store.lease("b@1"):
        best, ends, lease = as_json("tags", saved)
        assert (best["name"], best["expires"], *named([best])) == ("best", None, "a@2")
        assert ends == first
        assert lease["name"].startswith("lease-")
        assert named([lease]) == ["b@1"]
        assert all(int(tag["holder"].rpartition(":")[2]) == os.getpid() for tag in (best, ends, lease))
        lines = run("tags", saved).stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["NAME", "best", "eval", lease["name"]]
        assert as_json("gc", saved)["waiting"] == []
    assert len(as_json("tag", saved)) == 2
    assert "until" in run("tag", saved, "eval").stdout
    assert "error" in as_json("tags", saved / "nothing", status=3)
    as_json("tag", saved, "eval", "--expires", "1h", status=2)
    as_json("tag", saved, "eval", "a@1", "--expires", "12", status=2)
    as_json("tag", saved, "eval", "a@1", "--expires", "0", status=1)
    as_json("tag", saved, "--delete", "eval")
    store.forget("a@3")
    gone = as_json("list", saved, "--all")[2]["id"]
    assert as_json("tag", saved, "eval", gone, "--expires", "1h", status=3)["error"]["kind"] == "not-found"


def test_metrics_are_shown_and_sorted_by(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.save({"w": torch.zeros(1)}, run="m", step=1, metrics={"val": 0.5, "grad": float("nan")}, healthy=False)
    store.save({"w": torch.ones(1)}, run="m", step=2, metrics={"val": 0.25}, healthy=True)
    rows = as_json("list", saved, "--run", "m")
    assert [row["metrics"] for row in rows] == [{"val": 0.5, "grad": "nan"}, {"val": 0.25}]
    assert [row["healthy"] for row in rows] == [False, True]
    assert [row["healthy"] for row in as_json("list", saved, "--run", "b")] == [None]
    assert named(as_json("list", saved, "--sort", "val", "--limit", 2)) == ["m@2", "m@1"]
    text = run("list", saved, "--run", "m", "--show", "val", "--show", "grad").stdout
    assert "VAL" in text
    assert "0.25" in text
    assert text.splitlines()[1].endswith("unhealthy")
    shown = as_json("show", saved, "m@1")
    assert (shown["metrics"], shown["healthy"]) == ({"val": 0.5, "grad": "nan"}, False)
    text = run("show", saved, "m@1").stdout
    assert "val 0.5, grad nan" in text
    assert "unhealthy" in text


def test_what_a_save_found_is_told(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
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
    assert "no NaN, none infinite\n" in run("show", saved, "h@1").output
    store.save(tensors, run="f", step=1)
    store.save(tensors, run="f", step=2, health=True, frozen=["a"])
    assert "no NaN, none infinite; 1 tensor not looked at\n" in run("show", saved, "f@2").output
    before = {"nan": 0, "inf": 0, "largest": 2.5}
    assert as_json("diff", saved, "h@2", "--values")["values"] == [{"key": "a", "old": before, "new": sick}]
    assert re.search(r"a +2.5 +0 +1 NaN, 1 infinite", run("diff", saved, "h@2", "--values").output)


def test_forget_and_restore(saved: Path, as_json: AsJson, run: Run) -> None:
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


def test_restore_tells_what_was_restored_however_it_ends(
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


def test_watch_prints_a_line_for_each(saved: Path, store: casckpt.Store, run: Run) -> None:
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


def test_watch_refuses_what_makes_no_sense(saved: Path, tmp_path: Path, run: Run) -> None:
    assert run("watch", tmp_path / "none", "a", "--timeout", 0).stdout == ""
    assert "error" in run("watch", saved, "a", "--after", "a@9", "--json", status=3).stdout
    run("watch", saved, "a", "--after", "b@1", status=1)
    run("watch", saved, "a", "--poll", "10ms", status=2)
    run("watch", saved, status=2)


def test_follow_keeps_a_folder_at_the_newest(saved: Path, store: casckpt.Store, tmp_path: Path, run: Run) -> None:
    into = ["follow", saved, "a", "--to", tmp_path / "to", "--once"]
    row = json.loads(run(*into, "--json").stdout)
    assert (row["id"], row["status"]) == (store.get("a@3").id, None)
    assert Path(row["folder"]) == (tmp_path / "to" / "current").resolve()
    assert run(*into).stdout == ""
    run("follow", saved, "a", "--to", saved, "--once", status=1)


def test_a_tagged_one_is_forgotten_on_demand_only(saved: Path, as_json: AsJson) -> None:
    as_json("tag", saved, "best", "a@2")
    assert as_json("forget", saved, "a@1..3", status=5)["error"]["kind"] == "conflict"
    assert len(as_json("list", saved)) == 4
    assert len(as_json("forget", saved, "a@1..3", "--tagged")["forgotten"]) == 3


def test_gc_restores_what_is_tagged(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    store.tag("best", "a@2")
    forget(store.repository, store.get("a@2").commit)  # as a gc that was killed leaves it
    assert "would restore a@2" in run("gc", saved, "--dry-run").stdout
    assert named(as_json("gc", saved)["restored"]) == ["a@2"]
    assert "a@2" in run("show", saved, "tag:best").stdout


def test_gc_plans_what_it_then_does(saved: Path, as_json: AsJson, run: Run) -> None:
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


def test_gc_forgets_nothing_without_a_rule(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("gc", saved)["forgotten"] == []
    assert named(as_json("gc", saved, "--keep-every", 2, "--run", "a", "--dry-run")["forgotten"]) == ["a@1"]
    assert as_json("gc", saved, "--keep-within", "7d", "--dry-run")["forgotten"] == []
    for bare in ("soon", "7", "0.5", "-7d"):
        as_json("gc", saved, "--keep-within", bare, status=2)
    assert "give 7s or 7d if that is meant" in run("gc", saved, "--keep-within", "7", status=2).stderr
    for bare in ("loss", "loss:0", ":3"):
        assert 'as "loss:3"' in as_json("gc", saved, "--keep-best", bare, status=2)["error"]["message"]
    as_json("gc", saved, "--keep-last", 0, status=1)


def test_gc_says_what_waits_until_when(saved: Path, as_json: AsJson, run: Run) -> None:
    done = as_json("gc", saved, "--keep-last", 1, "--min-age", "1h")
    assert (len(done["forgotten"]), done["purged"]) == (2, [])
    assert [(one["reason"], *named([one])) for one in done["waiting"]] == [("young", "a@1"), ("young", "a@2")]
    assert datetime.fromisoformat(done["waiting"][0]["until"]) > datetime.now(UTC)
    assert "left for later: a@1" in run("gc", saved, "--min-age", "1h").stdout


def test_what_gc_forgets_by_a_rule_can_be_restored_for_a_day(saved: Path, as_json: AsJson, run: Run) -> None:
    """And the plan, the list and the sums say until when, and how much is freed then."""
    planned = as_json("gc", saved, "--keep-last", 1, "--dry-run")
    told = run("gc", saved, "--keep-last", 1).stdout
    assert told.count("forgot a@") == told.count(", can be restored until ") == 2
    assert "1 blob, " in told
    assert "are deleted later" in told
    day = datetime.fromisoformat(planned["waiting"][0]["until"]) - datetime.now(UTC)
    assert day > timedelta(hours=23)
    stats, listed = as_json("stats", saved), run("list", saved)
    assert (stats["bytes_freed_now"], stats["bytes_freed_later"]) == (0, planned["later_bytes"])
    assert planned["later_bytes"] > 0
    assert "2 checkpoints forgotten (--all lists them): a gc frees 0 B now, " in listed.stderr
    assert "2 checkpoints forgotten: a gc frees 0 B now, " in run("list", saved, "--all").stderr
    assert "forgotten" not in listed.stdout, "a pipe gets rows alone"
    assert as_json("report", saved)["freed"] == {"now": 0, "later": planned["later_bytes"]}
    for one in planned["forgotten"]:
        as_json("restore", saved, one["id"])
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1"]
    assert "forgotten" not in run("list", saved).output


def test_gc_says_who_is_in_the_way(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
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


def test_a_gc_that_cannot_read_a_manifest_shows_its_plan_and_does_nothing_of_it(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    next(saved.glob(f"objects/*/{store.get('a@3').id}.manifest")).unlink()
    rule = ("gc", saved, "--keep-last", 1, "--min-age", 0)
    planned = as_json(*rule, "--dry-run", status=4)
    assert (planned["error"]["kind"], planned["dry_run"]) == ("damaged", True)
    assert named(planned["forgotten"]) == named(planned["purged"]) == ["a@1", "a@2"]
    assert "would purge a@1 (" in (told := run(*rule, "--dry-run", status=4)).stdout
    assert "would delete" not in told.stdout
    assert "gc deletes nothing" in told.stderr
    done = as_json(*rule, status=4)
    assert (done["error"]["kind"], done["forgotten"], done["purged"]) == ("damaged", [], [])
    assert run(*rule, status=4).stdout == ""
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1"]
    thin = as_json("gc", saved, "--thin", next(iter(store.get("a@1").tensors)), status=4)["thin"]
    assert named(thin["thinned"]) == ["a@1", "a@2"]


def test_a_gc_that_is_interrupted_says_what_it_has_forgotten_and_purged(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("casckpt.cli.commands.gc._WaitReport.__call__", interrupt)
    transaction = begin(store.repository, "a", 4)
    done = as_json("gc", saved, "--keep-last", 2, "--min-age", 0, status=130)
    assert done["error"]["kind"] == "interrupted"
    assert named(done["forgotten"]) == named(done["purged"]) == ["a@1"]
    assert "deleted_blobs" not in done
    told = run("gc", saved, "--keep-last", 1, status=130)
    assert "forgot a@2 (" in told.stdout
    assert ", can be restored until " in told.stdout
    assert told.stderr.strip() == "casckpt: interrupted"
    transaction.abort("test")


def test_transactions_are_listed_and_revoked(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    assert as_json("transactions", saved) == []
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


def test_saves_whose_records_are_lost_are_named_and_given_up(saved: Path, as_json: AsJson, run: Run) -> None:
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


# care


def damage(store_path: Path) -> str:
    """Flip a bit of "shared" in the largest blob; its name."""
    blob = max(store_path.glob("objects/*/*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[12_000] ^= 1
    os.chmod(blob, 0o600)
    blob.write_bytes(data)
    return blob.stem


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


def test_of_many_that_need_a_damaged_blob_a_few_are_named() -> None:
    needed_by = [{"id": "f" * 64, "run": "a", "step": step} for step in range(2000)]
    assert needed({"keys": ["w"], "needed_by": needed_by}) == (
        "needed by a@0, a@1, a@2, a@3, a@4, ... and 1995 more (--json lists all): w"
    )


def test_damage_that_is_known_is_not_forgotten(saved: Path, as_json: AsJson, run: Run) -> None:
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


def test_verify_of_a_part(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("verify", saved, "b@1")["checked_checkpoints"] == 1
    said = run("verify", saved, "--sample", "0.01").output.splitlines()
    assert said[0].startswith(f"checked 1 of {as_json('stats', saved)['blobs']} blobs, ")
    assert "checkpoint" not in said[0]
    assert said[1] == "what was checked is well"
    assert as_json("verify", saved, "--sample", "0.01")["checked_blobs"] == 1
    as_json("verify", saved, "--sample", "0", status=2)
    as_json("verify", saved, "c@1", status=3)


def test_repair_takes_from_another_store(saved: Path, tmp_path: Path, as_json: AsJson, run: Run) -> None:
    other = casckpt.open(tmp_path / "other")
    other.save({"shared": torch.arange(5000.0), "own": torch.full((1000,), 1.0), "lr": 0.1}, run="a", step=1)
    blob = damage(saved)
    as_json("verify", saved, status=4)
    lost = as_json("repair", saved, status=4)
    assert [one["blob"] for one in lost["lost"]] == [blob]
    assert "--from" in run("repair", saved, status=4).stdout.splitlines()[-1]
    assert as_json("repair", saved, "--from", tmp_path / "other")["blobs"] == [blob]
    as_json("verify", saved)


def test_repair_says_that_it_leaves_records_alone(saved: Path, as_json: AsJson, run: Run) -> None:
    record = saved / "commits" / casckpt.open(saved).get("a@2").commit.txid
    record.chmod(0o644)
    os.truncate(record, 100)
    assert [one["key"] for one in as_json("repair", saved, status=4)["records"]] == [f"commits/{record.name}"]
    said = run("repair", saved, status=4).output
    assert f"not repaired: record commits/{record.name}: " in said
    assert "put the files back from a copy of the files" in said


def test_repair_from_a_store_that_is_not_there_finds_none(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    assert as_json("repair", saved, "--from", tmp_path / "nope", status=3)["error"]["kind"] == "not-found"


def test_reindex_makes_the_catalogue_anew(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    found = as_json("reindex", saved, "--cache-dir", tmp_path / "cache")
    assert found["checkpoints"] == 4
    assert Path(found["path"]).is_relative_to(tmp_path / "cache")
    assert Path(found["path"]).is_file()


def test_reindex_fails_where_there_can_be_no_catalogue(saved: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    said = run("reindex", saved, "--cache-dir", tmp_path / "file" / "below", status=1).stderr
    assert "catalogue.sqlite cannot be written" in said.splitlines()[-1]


def test_the_cache_folder_may_come_from_the_environment(
    saved: Path, tmp_path: Path, as_json: AsJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASCKPT_CACHE_DIR", str(tmp_path / "there"))
    assert Path(as_json("reindex", saved)["path"]).is_relative_to(tmp_path / "there")


def test_the_demo_shows_itself(tmp_path: Path, as_json: AsJson, run: Run) -> None:
    shown = as_json("demo", tmp_path / "store")
    results = {step["command"] or "load": step["result"] for step in shown["steps"]}
    assert results["load"] is True
    assert results["verify"]["damaged"] == []
    assert named(results["list"]) == ["demo@30"]
    assert named(as_json("list", tmp_path / "store")) == ["demo@30"]
    assert as_json("demo", tmp_path / "store", status=5)["error"]["kind"] == "conflict"
    text = run("demo").stdout
    assert "every bit is the same" in text
    folder = next(line.split()[3] for line in text.splitlines() if line.startswith("$ casckpt list"))
    assert not Path(folder).exists()


# lists


def test_a_list_may_be_short_sorted_and_with_columns_of_the_metadata(saved: Path, as_json: AsJson, run: Run) -> None:
    assert named(as_json("list", saved, "--limit", 2)) == ["a@3", "b@1"]
    assert named(as_json("ls", saved, "--sort", "loss")) == ["a@3", "a@2", "a@1", "b@1"]  # b@1 has none
    assert named(as_json("list", saved, "--sort", "-loss", "--limit", 1)) == ["a@1"]
    assert named(as_json("list", saved, "--sort", "-step", "--run", "a")) == ["a@3", "a@2", "a@1"]
    assert named(as_json("list", saved, "--sort", "size"))[0] == "b@1"
    shown = run("list", saved, "--sort", "loss", "--limit", 2).stdout
    assert "LOSS" in shown.splitlines()[0]
    assert "0.3333" in shown.splitlines()[1]
    assert "LOSS" in run("list", saved, "--show", "loss").stdout
    told = run("list", saved, "--sort", "accuracy", status=1).stderr
    assert "nothing in the list has a number 'accuracy' to sort by; there are created, loss, new" in told


def test_what_is_no_number_comes_last(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    for step, loss in ((4, "low"), (5, True), (6, None)):
        store.save({}, run="a", step=step, metadata={"loss": loss, "note": {"a": [1]}})
    assert named(as_json("list", saved, "--sort", "loss", "--run", "a"))[:4] == ["a@3", "a@2", "a@1", "a@4"]
    assert named(as_json("list", saved, "--sort", "-loss", "--run", "a"))[:4] == ["a@1", "a@2", "a@3", "a@4"]
    shown = run("list", saved, "--show", "loss", "--show", "note", "--show", "none").stdout
    assert all(value in shown for value in ("low", "true", "null", '{"a": [1]}'))
    told = run("list", saved, "--show", "los", "--show", "note").stderr
    assert "no checkpoint in the list has 'los' in its metrics or metadata; there are loss, note" in told
    assert "'note'" not in told


def test_many_values_are_summed_up_by_what_holds_them(saved: Path, store: casckpt.Store, run: Run) -> None:
    loops = {f"loop{number}": {"done": number} for number in range(30)}
    store.save({"lightning": loops, "epoch": 1, "optim": {"lr": 0.1, "eps": 0.2}}, run="c", step=1)
    (line,) = (line for line in run("show", saved, "c@1").stdout.splitlines() if line.startswith("objects"))
    assert line.split(maxsplit=1)[1] == "lightning.* (30 keys), epoch, optim.* (2 keys)"


def test_diff_of_one_is_with_its_parent(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    found = as_json("diff", saved, "a@3")
    assert (found["old"]["step"], found["new"]["step"], found["changed"]) == (2, 3, ["own"])
    assert "a@1 has no parent" in run("diff", saved, "a@1", status=3).stderr
    store.forget("a@1", "a@2")
    store.gc(min_age=0)
    assert "is gone; name another checkpoint" in run("diff", saved, "a@3", status=3).stderr


def test_show_says_how_to_see_many_tensors(store: casckpt.Store, store_path: Path, run: Run) -> None:
    store.save({f"w{number}": torch.zeros(1) for number in range(30)}, run="many", step=1)
    assert "--tensors lists them" in run("show", store_path, "many@1").stdout
    assert "--tensors lists them" not in run("show", store_path, "many@1", "--tensors").stdout


# where the store is


@pytest.mark.parametrize("way", ["-s", "--store", "environment"])
def test_the_store_may_be_named_once(saved: Path, as_json: AsJson, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    option = [] if way == "environment" else [way, saved]
    if way == "environment":
        monkeypatch.setenv("CASCKPT_STORE", str(saved))
    assert named(as_json("list", *option)) == ["a@1", "a@2", "a@3", "b@1"]
    assert as_json("show", "a@2", *option)["step"] == 2
    assert as_json("diff", *option, "a@1", "a@2")["changed"] == ["own"]
    assert as_json("verify", *option)["damaged"] == []
    assert named(as_json("copy", saved.parent / "copy", "a@1", *option)["copied"]) == ["a@1"]
    as_json("list", f"--store={saved}")


def test_a_store_named_twice_is_wrong_usage(saved: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("list", saved, "-s", saved, status=2)
    monkeypatch.setenv("CASCKPT_STORE", str(saved))
    assert "CASCKPT_STORE names the store" in run("list", saved, status=2).stderr
    said = run("show", status=2).stderr
    assert "Missing argument 'REF'" in said, "and not only where the store comes from"
    assert "CASCKPT_STORE names the store" in said
    assert "no checkpoints" in run("list", "-s", _empty(saved.parent / "other")).stdout


def test_without_a_store_all_ways_to_name_one_are_said(run: Run, as_json: AsJson) -> None:
    said = run("list", status=2).stderr
    assert "Missing argument 'STORE'" in said
    assert "-s or CASCKPT_STORE" in said
    assert "-s or" not in run("list", "s", "--limit", "0", status=2).stderr


def _empty(path: Path) -> Path:
    casckpt.open(path).create()
    return path


def test_a_slip_in_the_name_of_a_command(run: Run) -> None:
    assert "there is no command 'lst'; did you mean list?" in run("lst", status=2).stderr
    assert "did you mean forget?" in run("delete", status=2).stderr
    assert "did you mean" not in run("frobnicate", status=2).stderr


def test_an_export_says_what_has_no_place_in_a_format(tmp_path: Path, as_json: AsJson, run: Run) -> None:
    store = casckpt.open(tmp_path / "s")
    store.save({"a": 1}, step=0, attachments={".metadata": b"x", "note": b"y"})
    found = as_json("export", tmp_path / "s", "latest", tmp_path / "out.pt", "--format", "torch")
    assert (found["attachments"], found["skipped"]) == ([], [".metadata", "note"])
    said = run("export", tmp_path / "s", "latest", tmp_path / "again.pt", "--format", "torch").stdout
    assert "files left out: .metadata, note" in said
    refused = run("export", tmp_path / "s", "latest", tmp_path / "out", "--format", "dcp", status=1).stderr
    assert "--no-attachments" in refused.splitlines()[-1]
    found = as_json("export", tmp_path / "s", "latest", tmp_path / "out", "--format", "dcp", "--no-attachments")
    assert (found["attachments"], found["skipped"]) == ([], [".metadata", "note"])


def test_an_export_says_why_a_config_is_left_out(tmp_path: Path, run: Run) -> None:
    state = {"model": {"w": torch.ones(2), "v": torch.ones(1)}, "optim": {"m": torch.ones(2)}}
    casckpt.open(tmp_path / "s").save(state, step=0, attachments={"config.json": b"{}"})

    def said(out: str, *options: str) -> str:
        return run("export", tmp_path / "s", "latest", tmp_path / out, *options).stdout

    assert "a part of a model: from_pretrained would fill the rest" in said("part", "--keys", "model.w")
    assert "these are no names of a model" in said("all", "--format", "safetensors")
    unwanted = said("unwanted", "--no-attachments")
    assert "put that of the model there" in unwanted
    assert "part of a model" not in unwanted
    assert "no names" not in said("neither", "--format", "safetensors", "--no-attachments"), "it is not why"


def test_verbose_says_what_is_being_done(saved: Path, run: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    said = {
        ("gc", saved, "--keep-last", 1, "--min-age", 0): "2 live checkpoints, 3 objects that none of them needs",
        ("copy", saved, tmp_path / "copy"): "blobs to put, of",
        ("verify", saved): "blobs to look at",
        ("repair", saved): "0 blobs are damaged or gone; 0 manifests were put back",
        ("import", saved, tmp_path / "w.pt", "--step", 1): "is read as torch",
    }
    for command, line in said.items():
        told = run(*command, "-v").stderr
        assert line in told, told


def test_thin_and_restore_whole(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    key = next(iter(store.get("a@1").tensors))
    planned = as_json("thin", saved, "a@1", "--drop", key, "--dry-run")
    assert (planned["dry_run"], planned["entries"], named(planned["thinned"])) == (True, 1, ["a@1"])
    assert as_json("show", saved, "a@1")["dropped"] is None
    text = run("thin", saved, "--drop", key, "--keep-last", 2).stdout
    assert "thinned a@1" in text
    assert "freed by a gc after" in text
    assert [bool(row["dropped"]) for row in as_json("list", saved)] == [True, False, False, False]
    assert " thin" in run("list", saved).stdout
    assert f"by --drop {key}" in run("show", saved, "a@1").stdout
    assert named(as_json("restore", saved, "--whole", "a@1")["restored"]) == ["a@1"]
    assert as_json("show", saved, "a@1")["dropped"] is None
    assert as_json("thin", saved, "a@1", "--drop", "nothing", status=3)["error"]["kind"] == "missing-key"
    assert "one of both" in as_json("thin", saved, "--drop", key, status=1)["error"]["message"]


def test_gc_thins_by_a_rule(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    key = next(iter(store.get("a@1").tensors))
    rules = ("--thin", key, "--thin-keep-last", 1, "--keep-last", 2)
    planned = as_json("gc", saved, *rules, "--dry-run")
    assert (named(planned["forgotten"]), named(planned["thin"]["thinned"])) == (["a@1"], ["a@2"])
    assert "thinned a@2" in run("gc", saved, *rules, "--min-age", 0).stdout
    assert [(row["step"], bool(row["dropped"])) for row in as_json("list", saved, "--run", "a")] == [
        (2, True),
        (3, False),
    ]
    assert as_json("gc", saved, *rules)["thin"]["thinned"] == []


def test_a_pattern_that_matches_nothing_stops_a_gc_before_it_forgets(saved: Path, as_json: AsJson, run: Run) -> None:
    for more in ((), ("--dry-run",)):
        told = run("gc", saved, "--keep-last", 2, "--thin", "nix.*", *more, status=3)
        assert "no tensor of what was chosen matches 'nix.*'" in told.stderr
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1"]
    assert as_json("gc", saved, "--thin", "nix.*", "--thin-keep-last", 3)["thin"]["thinned"] == [], "all stay whole"


def test_a_metric_that_no_checkpoint_has_forgets_and_thins_nothing(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    key = next(iter(store.get("a@1").tensors))
    for command in (("gc",), ("gc", "--dry-run"), ("thin", "--drop", key), ("stats",)):
        told = run(command[0], saved, *command[1:], "--keep-best", "los:3", status=1).stderr
        assert "no checkpoint here has a metric 'los'; none of them has any" in told
    store.save({"w": 1}, run="c", step=1, metrics={"loss": 1.0})
    told = run("gc", saved, "--keep-best", "los:3", "--run", "c", status=1).stderr
    assert "no checkpoint of run c has a metric 'los'; there are loss" in told
    for command in (("gc",), ("thin", "--drop", key), ("stats",)):
        told = run(*command, saved, "--keep-best", "loss:3").stderr
        assert told.count("no checkpoint of run a, b has a number for 'loss', so all of these stay") == 1
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1", "c@1"]
    assert not any(row["dropped"] for row in as_json("list", saved))
