"""Stores that a user put together with rsync or cp: verify names what is wrong, no rule deletes, sound loads go on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import casckpt
from casckpt.errors import CasckptError, Damaged, NotFound
from casckpt.store.store import Store
from tests.cli.conftest import Run, run
from tests.support.buckets import state
from tests.support.hints import PACKAGE
from tests.support.pages import blocks_below, commands_in
from tests.support.saves import files, same_state, small_folder, steps

__all__ = ["run"]


def saved(path: Path, run: str, *numbers: int) -> Store:
    """Save steps of a run as a job on a host of its own. Create the store if there is none."""
    store = small_folder(path) if not path.exists() else casckpt.open(path, cache_dir=path.parent / f"host of {run}")
    for step in numbers:
        store.save(state(step), run=run, step=step)
    return store


def fresh(path: Path) -> Store:
    """Open the store on a host that has never seen it."""
    fresh.hosts += 1  # type: ignore[attr-defined]  # counts the hosts
    return casckpt.open(path, cache_dir=path.parent / f"host {fresh.hosts}")  # type: ignore[attr-defined]  # see above


fresh.hosts = 0  # type: ignore[attr-defined]  # see above


def merge(source: Path, target: Path, *parts: str) -> None:
    """Do what ``rsync -a --ignore-existing source/ target/`` does, for all parts by default."""
    for file in sorted(path for part in parts or ("",) for path in (source / part).rglob("*") if path.is_file()):
        place = target / file.relative_to(source)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place)


def refuses(path: Path, says: str) -> None:
    """Check that gc with a rule raises an error and changes nothing."""
    before = files(path)
    with pytest.raises(CasckptError, match=says):
        fresh(path).gc(keep_last=1, min_age=0, wait=0)
    assert {file: data for file, data in files(path).items() if file in before} == before


def collects(path: Path) -> None:
    """Check that nothing is wrong, and that gc with a rule works and leaves a sound store."""
    assert not fresh(path).verify().is_damaged
    fresh(path).gc(keep_last=1, min_age=0, wait=0)
    store = fresh(path)
    assert not store.verify().is_damaged
    for name, step in steps(store):
        assert same_state(store.read(f"{name}@{step}"), state(step))


def test_two_stores_whose_files_were_mixed_are_separated_as_verify_advises(tmp_path: Path, run: Run) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    saved(ours, "a", 1, 2).tag("best", "a@1")
    saved(theirs, "b", 1, 2).tag("best", "b@1")
    merge(theirs, ours)
    told = run("verify", ours, status=4).output
    assert "b@1" in told
    assert "came from another store" in told
    refuses(ours, "came from another store")
    assert same_state(fresh(ours).read("b@2"), state(2))
    assert same_state(fresh(ours).read("tag:best"), state(1))
    run("copy", ours, tmp_path / "again", "--run", "b")
    run("forget", ours, "b@1..", "--tagged")
    collects(ours)
    assert steps(fresh(ours)) == [("a", 1), ("a", 2)]
    collects(tmp_path / "again")
    assert steps(fresh(tmp_path / "again")) == [("b", 2)]


def test_a_run_that_was_continued_in_two_copies_of_a_store_stays_loadable_when_they_are_merged(
    tmp_path: Path, run: Run
) -> None:
    """Both have the same id, so no store counts as another's."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    saved(ours, "a", 1, 2)
    merge(ours, theirs)
    saved(ours, "a", 3, 4)
    store = casckpt.open(theirs, cache_dir=tmp_path / "elsewhere")
    for step in (3, 4, 5):
        store.save(state(step + 10), run="a", step=step)
    merge(theirs, ours)
    told = run("verify", ours, status=4).output
    assert told.count("the next gc announces it") == 2, "the files in runs/ have the same names in both copies"
    run("gc", ours)
    merged = fresh(ours)
    assert not merged.verify().is_damaged
    assert [step for _, step in steps(merged)] == [1, 2, 3, 4, 5]
    for step in (3, 4):
        assert any(same_state(merged.read(f"a@{step}"), state(number)) for number in (step, step + 10))
    assert same_state(merged.read("a@latest"), state(15))


@pytest.mark.parametrize("choice", ["restore", "give up"])
def test_a_store_that_was_restored_without_the_commits_of_the_last_day_is_not_collected(
    choice: str, tmp_path: Path, run: Run
) -> None:
    ours, backup = tmp_path / "ours", tmp_path / "backup"
    saved(ours, "a", 1, 2)
    merge(ours, backup, "commits", "runs")
    saved(ours, "a", 3, 4)
    aside = tmp_path / "aside"
    for part in ("commits", "runs"):
        shutil.move(ours / part, aside / part)
    merge(backup, ours)
    told = run("verify", ours, status=4).output
    refuses(ours, "records are missing from")
    assert same_state(fresh(ours).read("a@2"), state(2))
    if choice == "restore":
        merge(aside, ours, "commits", "runs")
    else:
        lost = set(os.listdir(aside / "commits")) - set(os.listdir(backup / "commits"))
        for txid in sorted(lost):
            assert txid in told
            run("transactions", ours, "--give-up", txid)
    collects(ours)
    assert steps(fresh(ours)) == [("a", 4 if choice == "restore" else 2)]
    saved(ours, "a", 9)
    assert steps(fresh(ours))[-1] == ("a", 9)


def test_a_host_whose_catalogue_does_not_fit_the_blobs_lists_what_the_store_has(tmp_path: Path) -> None:
    """The folder was replaced by an older snapshot, and later by a newer copy, which another host saved to."""
    ours, older, newer = (tmp_path / name for name in ("ours", "older", "newer"))
    saved(ours, "a", 1, 2)
    merge(ours, older)
    saved(ours, "a", 3)
    merge(ours, newer)
    store = casckpt.open(newer, cache_dir=tmp_path / "elsewhere")
    store.save(state(4), run="a", step=4)
    store.gc(keep_last=2, min_age=0, wait=0)
    host = tmp_path / "host"
    for snapshot, there in ((ours, [1, 2, 3]), (older, [1, 2]), (newer, [3, 4])):
        if snapshot != ours:
            shutil.rmtree(ours)
            merge(snapshot, ours)
        store = casckpt.open(ours, cache_dir=host)
        assert [step for _, step in steps(store)] == there
        assert all(same_state(store.read(f"a@{step}"), state(step)) for step in there)
        assert not store.verify().is_damaged
        if snapshot == older:
            with pytest.raises(NotFound):
                store.read("a@3")
        store.gc(keep_last=2, min_age=0, wait=0)
        assert not store.verify().is_damaged
        store.save(state(7), run="b", step=7)
        assert same_state(casckpt.open(ours, cache_dir=host).read("b@7"), state(7))
        store.forget("b@7")


@pytest.mark.parametrize("choice", ["repair", "forget"])
def test_a_copy_whose_objects_are_older_than_its_commits_is_named_and_repaired(
    choice: str, tmp_path: Path, run: Run
) -> None:
    """A job saved while the folders were copied in the wrong order."""
    ours, copy = tmp_path / "ours", tmp_path / "copy"
    saved(ours, "a", 1, 2)
    merge(ours, copy, "objects")
    saved(ours, "a", 3)
    merge(ours, copy)
    shutil.rmtree(copy / "objects" / max(os.listdir(copy / "objects")))
    told = run("verify", copy, status=4).output
    assert "a@3" in told
    assert "run `casckpt repair`" in told
    refuses(copy, "cannot read the manifests of these checkpoints")
    assert same_state(fresh(copy).read("a@2"), state(2))
    with pytest.raises(Damaged):
        fresh(copy).read("a@3")
    if choice == "repair":
        run("repair", copy, "--from", ours)
    else:
        run("repair", copy, status=4)
        run("forget", copy, "a@3")
        run("gc", copy, "--run", "a", "--min-age", "0")
    collects(copy)
    assert steps(fresh(copy)) == [("a", 3 if choice == "repair" else 2)]


def test_an_older_snapshot_in_the_place_of_a_mirror_stops_gc_for_what_it_lacks(tmp_path: Path, run: Run) -> None:
    ours, mirror, older = (tmp_path / name for name in ("ours", "mirror", "older"))
    saved(mirror, "a")
    store = casckpt.open(ours, cache_dir=tmp_path / "host", mirror=str(mirror))
    for step in (1, 2, 3):
        store.save(state(step), run="a", step=step)
        store.wait_for_mirror()
        if step == 1:
            merge(mirror, older)
    shutil.rmtree(mirror)
    merge(older, mirror)
    result = fresh(ours).gc(keep_last=1, min_age=0, wait=0)
    assert [commit.step for commit in result.purged] == [1]
    assert steps(fresh(ours)) == [("a", 2), ("a", 3)]
    run("copy", ours, mirror)
    assert not fresh(mirror).verify().is_damaged
    collects(ours)
    assert steps(fresh(ours)) == [("a", 3)]
    assert steps(fresh(mirror)) == [("a", 1), ("a", 2), ("a", 3)]


DOCUMENTED = commands_in(blocks_below(PACKAGE.parent / "docs/copies.md", "Copies by hand", "console")[0])[0][0]
"""The commands of docs/copies.md that copy ckpts to copy."""


def copied(folder: Path, commands: str, between: Callable[[], None]) -> None:
    """Copy a store by hand. Call ``between`` before each command ``cp``."""
    waits = 'cp() { echo; read -r _; command cp "$@"; }\n'
    with subprocess.Popen(
        ["bash", "-ec", waits + commands], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as shell:
        assert shell.stdin
        assert shell.stdout
        while shell.stdout.readline():
            between()
            shell.stdin.write(b"\n")
    assert shell.returncode == 0


@pytest.mark.process
def test_the_documented_copy_by_hand_verifies_although_jobs_save_and_tag_meanwhile(tmp_path: Path, run: Run) -> None:
    source, copy = saved(tmp_path / "ckpts", "a", 1, 2), tmp_path / "copy"

    def job() -> None:
        step = int(source.get("a@latest").step) + 1
        source.save(state(step), run="a", step=step)
        source.tag("newest", f"a@{step}")

    for _ in range(2):  # a copy, and a later one
        first = source.get("a@latest").step
        copied(tmp_path, DOCUMENTED, job)
        assert source.get("a@latest").step > first + 3
        assert not fresh(copy).verify().is_damaged
        there = [step for _, step in steps(fresh(copy))]
        assert there == [*range(1, len(there) + 1)]
        assert len(there) >= first
        assert same_state(fresh(copy).read(f"a@{first}"), state(first))
    copied(tmp_path, DOCUMENTED, lambda: None)  # at the end, nothing is left out
    assert steps(fresh(copy)) == steps(source)
    collects(copy)


@pytest.mark.process
def test_a_copy_in_one_pass_is_completed_by_the_documented_one_as_verify_advises(tmp_path: Path, run: Run) -> None:
    source, copy = saved(tmp_path / "ckpts", "a", 1, 2), tmp_path / "copy"
    saves = iter([[], [], [3]])
    one_pass = "mkdir copy; for part in casckpt.json commits objects; do cp -rn ckpts/$part copy/; done"
    copied(tmp_path, one_pass, lambda: (saved(tmp_path / "ckpts", "a", *next(saves)), None)[1])
    told = run("verify", copy, status=4).output
    assert "repeat the copy, which brings the records" in told
    copied(tmp_path, DOCUMENTED, lambda: None)
    assert "all is well" in run("verify", copy).output
    assert steps(fresh(copy)) == steps(source) == [("a", 1), ("a", 2), ("a", 3)]
