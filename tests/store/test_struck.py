"""Stopping or killing a process at any call does not harm other processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from casckpt.frontends.follow import CURRENT
from casckpt.store.store import Store
from tests.support.killed_saves import check_clean, side_by_side
from tests.support.saves import same_state
from tests.support.scripts import run_script
from tests.support.shared import made_once
from tests.support.struck import KEPT, KILLED, LATER, MEET, NEW, RUNS, Point, Scene, merged, state

if TYPE_CHECKING:
    from tests.support.servers import Server

PATIENCE = 4 * 3600.0  # seconds, for a sweep of all points
pytestmark = [pytest.mark.kill, pytest.mark.timeout(PATIENCE)]
ROOT = Path(__file__).parents[2]
POINTS = 1  # of each kind, in each way; all with --full; in buckets, the number passed as --points
CAN_END = {
    "gc": {"Conflict"},  # other processes were faster several times
    "copy": {"Conflict", "Gone", "Revoked"},  # its checkpoint was purged, or a gc revoked it
    "thin": {"Conflict", "Gone"},  # its checkpoint was purged
}
"""The errors with which a stopped process may end if it does not have to succeed."""


@pytest.fixture(scope="module", params=["folders", pytest.param("buckets", marks=pytest.mark.soak)])
def struck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Point:
    """The initial state, and a point for each call at which a process was killed or stopped."""
    seed = str(int(request.config.getoption("--hypothesis-seed") or 0))
    bucket, points = None, 0 if request.config.getoption("--full") else POINTS
    if request.param == "buckets":
        points = int(request.config.getoption("--points"))
        server: Server = request.getfixturevalue("seaweed_server")
        bucket = (server.new_place(), server.endpoint)

    def sweep(folder: Path) -> None:
        arguments = (folder, str(points), seed, *(bucket or ()))
        done = run_script("tests.support.struck", *arguments, cwd=ROOT, patience=PATIENCE)
        assert done.status == 0, done.told

    if bucket is not None:  # only this worker uses the server
        sweep(folder := tmp_path_factory.mktemp("struck"))
    else:
        folder = made_once(tmp_path_factory, "struck", sweep)
    return Point(folder / "base", bucket)


def check_whole(store: Store) -> None:
    """Check that all visible checkpoints equal the saved ones or lack only thinned entries."""
    for one in store.checkpoints():
        want = state(one.step) if one.run == "default" else merged()
        keys = ["model.*"] if one.dropped else None
        assert same_state(store.read(one, keys=keys), {"model": want["model"]} if one.dropped else want), one


def flattened(nested: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{part}.{name}": tensor for part, held in nested.items() for name, tensor in held.items()}


def check_what_it_did(scene: Scene, name: str) -> None:
    """Check that the next operation of the same kind completed the rest."""
    here = {(one.run, one.step) for one in scene.store.checkpoints()}
    wanted = {NEW} if name in MEET else {NEW, LATER} if name == "save" else {*KEPT, LATER}
    assert here == {("default", step) for step in wanted} | ({("merged", NEW)} if name == "merge" else set())
    if name in ("copy", "mirror"):
        away = scene.point.away()
        away.gc(min_age=0, wait=0, revoke_after=0)
        assert here <= {(one.run, one.step) for one in away.checkpoints()}
        check_whole(away)
        assert not away.verify().is_damaged
        check_clean(away)
    if name == "thin":
        assert [bool(one.dropped) for one in scene.store.checkpoints()] == [True, True, False]
    if name == "follow":
        held = load_file(scene.folder / "to" / CURRENT / "model.safetensors")
        want = flattened(state(LATER))
        assert held.keys() == want.keys()
        assert all(torch.equal(held[key], want[key]) for key in want)


@pytest.mark.parametrize(
    ("name", "sends"), [*((one, "SIGSTOP") for one in (*RUNS, *MEET)), *((one, "SIGKILL") for one in KILLED)]
)
def test_a_failure_at_any_call_does_not_lose_data_and_the_next_attempt_succeeds(
    struck: Point, name: str, sends: str
) -> None:
    points = [struck.beside(one.name) for one in sorted(struck.folder.parent.glob(f"{name}-{sends}-*"))]
    assert len(points) >= POINTS
    assert side_by_side([partial(check_point, point, name, sends) for point in points], struck.at_once)


def check_point(point: Point, name: str, sends: str) -> None:
    """Check the result of one strike."""
    told = point.folder / "ended"
    ended, where = told.read_text() if told.exists() else "", point.folder.name
    assert (ended == "") == (sends == "SIGKILL"), where
    assert ended in {"well", ""} | CAN_END.get(name, set()), (where, ended)
    store = point.store()
    if name != "repair":
        check_whole(store)
        assert not store.verify().is_damaged, where
    scene = Scene(point)
    if name in RUNS and (name not in ("save", "merge") or NEW not in {one.step for one in store.checkpoints()}):
        RUNS[name](scene)
    check_whole(point.store())
    check_what_it_did(scene, name)
    assert not point.store().verify(decode=True).is_damaged, where
    assert not point.store().gc(min_age=0, wait=0, revoke_after=0).waiting, where
    check_clean(store)
