"""``casckpt copy``: its output, and copies by processes that are killed or that share the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import casckpt
from casckpt.errors import Conflict, Damaged
from tests.cli.conftest import AsJson, Run
from tests.support.saves import blob_keys, cells, flip, same_state, small_folder, steps, trained

CASCKPT = (sys.executable, "-m", "casckpt")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def test_copy_copies_the_missing_checkpoints_and_lists_them(
    run: Run, as_json: AsJson, saved: Path, there: Path
) -> None:
    planned = as_json("copy", saved, there, "--dry-run")
    assert not there.exists()
    found = as_json("copy", saved, there, "a@1", "a@2..3")
    assert ([one["step"] for one in found["copied"]], found["made_store"]) == ([1, 2, 3], True)
    assert "copied b@1" in run("copy", saved, there).output
    assert planned["bytes_copied"] == sum(path.stat().st_size for path in there.rglob("*.safetensors"))
    assert "copied 0 checkpoints, 0 B; 4 checkpoints already there" in run("copy", saved, there).output
    run("verify", there)
    ids = [[row["id"] for row in as_json("list", store)] for store in (saved, there)]
    assert ids[0] == ids[1]


def test_copy_can_include_tags_and_select_runs(as_json: AsJson, run: Run, saved: Path, there: Path) -> None:
    run("tag", saved, "best", "a@2")
    found = as_json("copy", saved, there, "--run", "a", "--tags")
    assert (found["tags"], len(found["copied"])) == (["best"], 3)
    assert [row["tags"] for row in as_json("list", there)] == [[], ["best"], []]


def test_a_copy_of_the_whole_store_includes_the_tags_that_the_target_does_not_have(
    as_json: AsJson, run: Run, saved: Path, there: Path, store: casckpt.Store
) -> None:
    for name, ref in (("best", "a@2"), ("good", "a@1"), ("hidden", "a@3")):
        run("tag", saved, name, ref)
    store.tag("short", "a@1", expires="1h")
    assert as_json("copy", saved, there, "a@1..2")["tags"] == []
    assert as_json("copy", saved, there, "--no-tags", "--run", "a")["tags"] == []
    run("tag", there, "best", "a@1")
    casckpt.open(there).forget("a@3")
    found = {"tags": ["good"], "tags_left": {
        "best": "the target has it on a different checkpoint; --tags (tags=True) moves it",
        "hidden": "its checkpoint was not copied",
    }}  # fmt: skip
    for how in ("--no-tags", "--dry-run", "--jobs=1"):
        done = as_json("copy", saved, there, how)
        wanted = {"tags": [], "tags_left": {}} if how == "--no-tags" else found
        assert {name: done[name] for name in found} == wanted
    assert {row["name"]: row["step"] for row in as_json("tag", there)} == {"best": 1, "good": 1}
    told = run("copy", saved, there).stdout
    assert "left the tag best: the target has it on a different checkpoint" in told
    assert "set the tags" not in told


def test_a_tag_that_cannot_be_read_is_left_by_a_copy_of_the_whole_store(
    as_json: AsJson, run: Run, saved: Path, there: Path
) -> None:
    for name in ("best", "good"):
        run("tag", saved, name, "a@2")
    path = saved / "tags" / "best" / "0"
    path.chmod(0o600)
    path.write_bytes(b"{")
    found = as_json("copy", saved, there)
    assert (len(found["copied"]), found["tags"], list(found["tags_left"])) == (4, ["good"], ["best"])
    as_json("copy", saved, there, "--tags", status=4)


def test_copy_compresses_floats(as_json: AsJson, run: Run, tmp_path: Path, there: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save({"w": trained(50, 0)}, step=0)
    copied = as_json("copy", store.url, there, "--compress", "always")
    assert copied["bytes_copied"] < 0.9 * store.get("default@0").stats.bytes_written
    run("verify", there, "--decode")
    assert same_state(casckpt.open(there).read("default@0"), {"w": trained(50, 0)})


def test_a_copy_into_the_stores_own_folder_is_refused(run: Run, saved: Path) -> None:
    before = sorted(saved.rglob("*"))
    for place in (saved, saved / "tags", saved / "new"):
        assert "inside the store's own folder" in run("copy", saved, place, "a@1", status=1).stderr
    assert sorted(saved.rglob("*")) == before


def test_copy_reports_a_missing_run(run: Run, saved: Path, there: Path) -> None:
    assert "no checkpoint of run 'typo'" in run("copy", saved, there, "--run", "typo", status=3).stderr
    assert not there.exists()


def test_an_error_suggests_dst_option_for_options_of_the_target(run: Run, saved: Path) -> None:
    said = run("copy", saved, "s3://bucket/x", "--storage-option", "anon=true", status=2).stderr
    assert "use --dst-option for DST" in said


def test_a_target_with_a_different_checkpoint_at_a_step_is_a_conflict(
    run: Run, as_json: AsJson, saved: Path, there: Path
) -> None:
    casckpt.open(there).save({"mine": cells(1)}, run="a", step=2)
    found = as_json("copy", saved, there, status=5)
    assert [(one["step"], one["kind"]) for one in found["failed"]] == [(2, "conflict")]
    assert {(row["run"], row["step"]) for row in as_json("list", there)} == {("a", 1), ("a", 2), ("a", 3), ("b", 1)}
    assert "not copied: a@2" in run("copy", saved, there, "a@2", status=5).output
    with pytest.raises(Conflict, match="forget it there"):
        casckpt.open(saved).copy_to(there, "a@2")


def test_copy_rejects_a_damaged_blob(as_json: AsJson, saved: Path, there: Path) -> None:
    store = casckpt.open(saved)
    blob = max(blob_keys(store), key=lambda key: (saved / key).stat().st_size)
    flip(store, blob, 5000)
    found = as_json("copy", saved, there, "a@1", status=4)
    assert [one["kind"] for one in found["failed"]] == ["damaged"]
    assert blob.split("/")[2].split(".")[0] in found["failed"][0]["why"]
    assert as_json("list", there) == []
    with pytest.raises(Damaged, match="casckpt repair") as raised:
        store.copy_to(there)
    assert "shared" in raised.value.keys


def test_damage_shared_by_several_checkpoints_is_reported_once(
    run: Run, as_json: AsJson, saved: Path, there: Path
) -> None:
    store = casckpt.open(saved)
    blob = max(blob_keys(store), key=lambda key: (saved / key).stat().st_size)
    flip(store, blob, 5000)
    failed = as_json("copy", saved, there, status=4)["failed"]
    assert [one["blob"] for one in failed] == [blob.split("/")[2].split(".")[0]] * 4
    said = run("copy", saved, there, status=4).output
    assert said.count("is damaged") == 1
    assert "not copied: a@1 (" in said
    assert "), a@2 (" in said


def test_a_damaged_record_is_reported_and_all_other_checkpoints_are_copied(
    run: Run, as_json: AsJson, saved: Path, there: Path
) -> None:
    record = saved / "commits" / casckpt.open(saved).get("a@2").commit.txid
    record.chmod(0o644)
    os.truncate(record, 100)
    found = as_json("copy", saved, there, status=4)
    assert [one["step"] for one in found["copied"]] == [1, 3, 1]
    assert [one["key"] for one in found["records"]] == [f"commits/{record.name}"]
    assert f"not copied: the checkpoint of commits/{record.name}: " in run("copy", saved, there, status=4).output
    with pytest.raises(Damaged, match="was not copied"):
        casckpt.open(saved).copy_to(there)


def test_copy_reports_forgotten_checkpoints(run: Run, saved: Path, there: Path) -> None:
    run("copy", saved, there)
    run("forget", there, "a@1")
    assert "still forgotten in DST: a@1" in run("copy", saved, there).output
    assert "restored a@1" in run("copy", saved, there, "a@1").output


# processes


@pytest.fixture
def many(tmp_path: Path) -> casckpt.Store:
    """A checkpoint with many blobs."""
    store = small_folder(tmp_path / "many")
    store.save({"w": cells(300, seed=3)}, step=1)
    assert len(blob_keys(store)) > 15
    return store


def kill_a_copy(store: casckpt.Store, there: Path) -> None:
    """Kill a copy with SIGKILL before it ends."""
    code = (
        "import os, sys, casckpt\n"
        "seen = []\n"
        "def progress(done, total):\n"
        "    seen.append(done)\n"
        "    if len(seen) > 4:\n"
        "        os._exit(9)\n"
        "casckpt.open(sys.argv[1]).copy_to(sys.argv[2], jobs=1, progress=progress)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, store.url, str(there)], check=False)
    assert done.returncode == 9
    assert steps(casckpt.open(there)) == []


def test_a_killed_copy_is_resumed(as_json: AsJson, many: casckpt.Store, there: Path) -> None:
    kill_a_copy(many, there)
    kept = blob_keys(casckpt.open(there))
    assert kept
    found = as_json("copy", many.url, there)
    assert found["blobs_copied"] == len(blob_keys(many)) - len(kept)
    other = casckpt.open(there)
    assert {*kept} < {*blob_keys(other)}
    assert len(blob_keys(other)) == len(blob_keys(many)), "the second copy uploaded only the rest"
    assert same_state(other.read("latest"), many.read("latest"))
    assert not other.verify().is_damaged
    assert other.gc(min_age=0).deleted_blobs == 0


def test_a_copy_resumed_by_a_second_process_is_not_shown_as_dead(
    as_json: AsJson, many: casckpt.Store, there: Path
) -> None:
    kill_a_copy(many, there)
    assert [row["alive"] for row in as_json("transactions", there)] == [False]
    seen: list[list[bool | None]] = []
    many.copy_to(
        there, progress=lambda done, total: seen.append([row["alive"] for row in as_json("transactions", there)])
    )
    assert [None] in seen
    assert as_json("transactions", there) == []


def test_gc_revokes_a_killed_copy_and_the_next_copy_starts_over(
    as_json: AsJson, many: casckpt.Store, there: Path
) -> None:
    kill_a_copy(many, there)
    other = casckpt.open(there)
    assert other.gc(min_age=0).deleted_blobs > 0
    found = as_json("copy", many.url, there)
    assert found["blobs_copied"] == len(blob_keys(many))
    assert same_state(other.read("latest"), many.read("latest"))


def test_two_processes_can_copy_the_same_checkpoints_while_gc_runs(many: casckpt.Store, there: Path) -> None:
    many.save({"w": cells(200, seed=4)}, step=2)
    started = [
        subprocess.Popen(
            [*CASCKPT, "copy", many.url, str(there), "--json", "--jobs", "2"],
            stdout=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    other = casckpt.open(there)
    while any(process.poll() is None for process in started):
        if (there / "casckpt.json").exists():
            other.gc(wait=0, min_age=0)
    assert [process.wait() for process in started] == [0, 0]
    assert steps(other) == [("default", 1), ("default", 2)]
    assert not other.verify().is_damaged
    for step in (1, 2):
        assert same_state(other.read(f"default@{step}"), many.read(f"default@{step}"))
