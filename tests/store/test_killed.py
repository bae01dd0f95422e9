"""A save that is killed at any instant leaves the complete checkpoint or nothing, and does not block later saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.storage.local.spare import COUNT as PREPARED
from casckpt.storage.local.spare import SIZE
from tests.support import killed_thins, killed_when_full
from tests.support.killed_saves import WAYS, check_all, check_clean, open_folder, state
from tests.support.saves import same_state, steps
from tests.support.scripts import run_script
from tests.support.shared import made_once

pytestmark = pytest.mark.kill

ROOT = Path(__file__).parents[2]
SAVES, THINS, FREED = (f"tests.support.{name}" for name in ("killed_saves", "killed_thins", "killed_when_full"))
PATIENCE = 4 * 3600.0  # seconds, for a sweep of all points
POINTS = 4  # in each way


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with a store for each point at which a save was killed."""
    full = bool(request.config.getoption("--full"))
    numbers = [str(0 if full else POINTS), str(int(request.config.getoption("--hypothesis-seed") or 0))]
    return made_once(
        tmp_path_factory,
        "killed",
        lambda folder: done(SAVES, "sweep", folder, *numbers),
    )


def done(module: str, *arguments: str | Path) -> None:
    """Run a program to its end."""
    ended = run_script(module, *arguments, cwd=ROOT, patience=PATIENCE)
    assert ended.status == 0, ended.told


@pytest.mark.parametrize("way", WAYS)
def test_killing_a_save_at_many_instants_does_not_lose_data(killed: Path, way: str) -> None:
    points = sorted(killed.glob(f"{way}-*"))
    assert len(points) >= POINTS
    outcomes, deltas = set[bool](), set[bool]()
    for point in points:
        store = open_folder(point)
        visible = ("default", 2) in steps(store)
        outcomes.add(visible)
        assert steps(store) == [("default", 1)] + [("default", 2)] * visible, point.name
        check_all(store, {("default", step): state(step) for step in (1, 2)})
        assert not store.verify().is_damaged
        result = store.gc(wait=0, min_age=0)
        assert not result.waiting, point.name  # the process is dead, and this host can prove it
        check_clean(store)
        check_all(store, {("default", step): state(step) for step in (1, 2)})
        store.save(state(3), step=3, compress="auto")
        deltas.add(store.get("default@3").commit.committed.bytes_deltas > 0)
        assert same_state(open_folder(point).read("default@3"), state(3))
        assert not store.verify().is_damaged
    assert outcomes == {False, True} or way == "timed"
    assert deltas == {True}


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with a store for each point at which thinning was killed."""
    full = bool(request.config.getoption("--full"))
    numbers = [str(100 if full else 8), str(int(request.config.getoption("--hypothesis-seed") or 0))]
    return made_once(tmp_path_factory, "thinned", lambda folder: done(THINS, folder, *numbers))


@pytest.mark.parametrize("way", killed_thins.WAYS)
def test_killing_a_thinning_or_its_gc_at_many_instants_does_not_lose_data(thinned: Path, way: str) -> None:
    ids = {one.step: one.id for one in open_folder(thinned / "base").checkpoints()}
    points, states = sorted(thinned.glob(f"{way}-*")), set[bool]()
    assert len(points) >= POINTS
    for point in points:
        store = open_folder(point)
        assert {one.step: one.id for one in store.checkpoints()} == ids, point.name
        assert not store.verify().is_damaged
        states.add(all(one.dropped for one in store.checkpoints()[:-1]))
        for one in store.checkpoints():
            whole = killed_thins.state(one.step)
            want = {"model": whole["model"]} if one.dropped else whole
            assert same_state(store.read(one, keys=["model.*"] if one.dropped else None), want), point.name
        store.thin(drop=killed_thins.DROP, keep_last=1)
        assert not store.gc(min_age=0, wait=0).waiting
        check_clean(store)
        assert [bool(one.dropped) for one in store.checkpoints()] == [True, True, False]
        last = killed_thins.state(killed_thins.COUNT - 1)
        assert same_state(store.read("latest"), last)
        assert store.save(last, step=9).stats.bytes_written == 0
    assert states == {False, True}


def is_prepared(point: Path) -> bool:
    found = [path.stat() for path in (point / "store" / ".spare").iterdir()]
    return [(one.st_size, one.st_nlink) for one in found] == [(SIZE, 1)] * PREPARED


@pytest.mark.parametrize("scene", killed_when_full.SCENES)
def test_killing_what_frees_a_full_disk_at_many_instants_does_not_lose_data(
    scene: str, tmp_path: Path, full: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(FREED, scene, tmp_path, str(100 if full else 2), str(seed))
    ids = {one.step: one.id for one in open_folder(tmp_path / "base").checkpoints()}
    for point in (path for path in tmp_path.iterdir() if path.name.startswith(killed_thins.WAYS)):
        with monkeypatch.context() as patch:
            if scene != "unprepared save":  # otherwise, the file that filled the disk is gone, as gc needs room, too
                killed_when_full.limit(point, patch)
            store = open_folder(point)
            here = {one.step: one.id for one in store.checkpoints()}
            assert here.items() <= ids.items(), point.name
            assert here == ids or scene == "gc", point.name
            assert not store.verify().is_damaged, point.name
            for one in store.checkpoints():
                want = killed_when_full.state(one.step)
                read = store.read(one, keys=["model.*"] if one.dropped else None)
                assert same_state(read, {"model": want["model"]} if one.dropped else want), point.name
            assert not store.gc(keep_last=1, min_age=0, wait=0).waiting, point.name
            check_clean(store)
            assert [one.step for one in store.checkpoints()] == [killed_thins.COUNT - 1], point.name
            assert is_prepared(point), point.name
        last = killed_when_full.state(killed_thins.COUNT)
        assert same_state(store.read(store.save(last, step=killed_thins.COUNT)), last), point.name


@pytest.mark.parametrize("saves", [8, pytest.param(60, marks=pytest.mark.soak)])
def test_two_processes_save_during_a_gc(tmp_path: Path, saves: int) -> None:
    done(SAVES, "race", tmp_path, str(saves))
    store = open_folder(tmp_path)
    assert {ckpt.run for ckpt in store.checkpoints()} == {"a", "b"}
    assert len(store.checkpoints()) >= 4
    check_all(store, {(run, step): state(step) | {"run": run} for run in ("a", "b") for step in range(saves)})
    assert not store.verify().is_damaged
    assert int((tmp_path / "deleted").read_text()) > 0
    store.gc(keep_last=1, min_age=0)
    check_clean(store)
    assert len(store.checkpoints()) == 2
    check_all(store, {(run, step): state(step) | {"run": run} for run in ("a", "b") for step in range(saves)})
