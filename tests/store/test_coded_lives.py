"""Delta checkpoints during gc, copies and mirroring, with interruptions at any call."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import CasckptError
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from casckpt.upkeep.copies import mirror
from tests.support.dying import WAYS, Dying, Killed
from tests.support.far import FarStore
from tests.support.faulty import FaultyStore, fail_before
from tests.support.repositories import again, memory, objects_of
from tests.support.saves import cells, reopened, same_state, small, small_folder, steps, trained

pytestmark = pytest.mark.sweep
STEPS = 6


def state(step: int) -> dict[str, Any]:
    return {"w": trained(12, step), "still": cells(3, seed=1), "n": step}


def saved(store: Store, *, more: int = STEPS) -> Store:
    for step in range(more):
        store.save(state(step), step=step, compress="auto")
    return store


def check(store: Store, wanted: list[int]) -> None:
    """Check that exactly these checkpoints are visible, complete and verified."""
    found = reopened(store)
    assert [step for _, step in steps(found)] == wanted
    assert all(same_state(found.read(f"default@{step}"), state(step)) for step in wanted)
    assert not found.verify(decode=True).is_damaged


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """The objects of a store with a full version and deltas."""
    store = saved(small(memory()))
    assert [ckpt.commit.committed.bytes_deltas > 0 for ckpt in store.checkpoints()] == [False] + [True] * (STEPS - 1)
    return objects_of(store.repository.storage)


@pytest.mark.parametrize("way", WAYS)
def test_gc_of_delta_checkpoints_can_be_killed_at_any_point(
    objects: dict[str, bytes], way: str, seed: int, full: bool
) -> None:
    stride = 1 if full else 3  # each kind of interruption begins at a different call
    at, ended = seed % stride, False
    while not ended:
        at += stride
        storage = again(objects)
        dying = Dying(storage, at, way)
        with suppress(Killed, CasckptError):
            Store(Repository(dying)).gc(keep_last=2, min_age=0)
        ended = dying.changes < at
        store = Store(Repository(storage))
        left = [step for _, step in steps(store)]
        assert left[-2:] == [STEPS - 2, STEPS - 1]
        check(store, left)
        store.gc(keep_last=2, min_age=0, wait=0, revoke_after=0)
        check(store, [STEPS - 2, STEPS - 1])
        store.save(state(STEPS), step=STEPS, compress="auto")
        check(store, [STEPS - 2, STEPS - 1, STEPS])
    assert at > STEPS


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_delta_checkpoint_includes_its_bases(
    objects: dict[str, bytes], way: str, seed: int, full: bool
) -> None:
    """A copy into an empty store that is interrupted at any call is complete or absent. The next copy completes it."""
    stride = 1 if full else 3
    source, at, ended = Store(Repository(again(objects))), seed % stride, False
    while not ended:
        at += stride
        storage = memory()
        dying = Dying(storage, at, way)
        with suppress(Killed, CasckptError):
            source.copy_to(Store(Repository(dying)), "default@4", jobs=1)
        ended = dying.changes < at
        target = Store(Repository(storage))
        if target.repository.exists():
            check(target, [4] if target.checkpoints() else [])
        source.copy_to(target, "default@4", jobs=1)
        check(target, [4])
        source.copy_to(target, "default@5")
        target.save(state(STEPS), step=STEPS, compress="auto")
        target.gc(keep_last=1, min_age=0, wait=0, revoke_after=0)
        check(target, [STEPS])
    assert at > 4


def test_a_prefetch_fetches_everything_that_a_load_needs(objects: dict[str, bytes], tmp_path: Path) -> None:
    storage = FarStore(again(objects))
    for template in (None, {"w": torch.zeros_like(state(0)["w"])}):
        store = Store(Repository(storage, tmp_path / str(template is None), cache_bytes=1 << 30))
        assert store.pre_download("default@4", template) > 0
        before, found = storage.reads_of_blobs(), {"w": torch.zeros_like(state(0)["w"])}
        store.load(found, "default@4", unread="ignore")
        assert storage.reads_of_blobs() == before
        assert same_state(found["w"], state(4)["w"])


def test_thinned_checkpoints_keep_the_bases_of_their_weights() -> None:
    """Other bases are not copied."""
    store = small(memory())
    for step in range(STEPS):
        store.save({"model": state(step), "optim": {"w": trained(30, step, seed=9)}}, step=step, compress="auto")
    before, ids = store.stats().bytes_blobs, [one.id for one in store.checkpoints()]
    assert len(store.thin(drop=["optim.*"], keep_last=1).thinned) == STEPS - 1
    store.gc(min_age=0, wait=0)
    found = reopened(store)
    assert [one.id for one in found.checkpoints()] == ids
    for step in range(STEPS):
        assert same_state(found.read(f"default@{step}", keys=["model.*"])["model"], state(step))
    assert same_state(found.read("latest")["optim"], {"w": trained(30, STEPS - 1, seed=9)})
    assert not found.verify(decode=True).is_damaged
    store.forget(f"default@{STEPS - 1}")
    store.gc(min_age=0, wait=0)
    assert store.stats().bytes_blobs < 0.5 * before
    assert same_state(reopened(store).read("default@3", keys=["model.*"])["model"], state(3))


@pytest.mark.parametrize("at", [1, 3, 6, 10])
def test_a_mirror_follows_saves_of_deltas(tmp_path: Path, at: int) -> None:
    """The mirror's visible checkpoints are complete even after failures.

    The store purges only checkpoints that are in the mirror.
    """
    link = FaultyStore(LocalStore(tmp_path / "away"))
    small_folder(tmp_path / "store")
    store = casckpt.open(tmp_path / "store", mirror=Store(Repository(link)))
    link.inject(fail_before("put", at=at, times=1 << 30))
    for step in range(STEPS):
        store.save(state(step), step=step, compress="auto")
    with suppress(CasckptError):
        store.wait_for_mirror()
    store.gc(keep_last=2, min_age=0, wait=0)
    link.heal()
    away = casckpt.open(tmp_path / "away")
    if away.repository.exists():
        check(away, [step for _, step in steps(away)])
    store.wait_for_mirror()
    store.gc(keep_last=2, min_age=0, wait=0)
    check(store, [STEPS - 2, STEPS - 1])
    check(away, [step for _, step in steps(away)])
    assert {STEPS - 2, STEPS - 1} <= {step for _, step in steps(away)}
    assert {ckpt.id for ckpt in store.checkpoints()} <= {ckpt.id for ckpt in away.checkpoints()}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_a_mirror_killed_at_any_point_shows_only_complete_checkpoints(
    objects: dict[str, bytes], way: str, seed: int, monkeypatch: pytest.MonkeyPatch, *, full: bool
) -> None:
    """The process is killed at any change to the store or the mirror.

    After that, gc purges only checkpoints that are in the mirror.
    """
    monkeypatch.setattr(mirror, "JOBS", 1)
    stride = 1 if full else 7
    at, ended, shown = seed % stride, False, set[int]()
    while not ended:
        at += stride
        storage, away = again(objects), memory()
        near = Dying(storage, at, way)
        Store(Repository(storage)).change_settings(mirror=away.url)
        with suppress(Killed, CasckptError):
            caught_up(near, Dying(away, at, way, beside=near))
        ended = near.changes < at
        there = steps_of(away)
        shown.add(len(there))
        assert there == list(range(len(there))), "oldest first"
        Store(Repository(storage)).gc(keep_last=1, min_age=0, wait=0, revoke_after=0)
        left = steps_of(storage)
        assert set(left) | set(there) == set(range(STEPS))
        caught_up(storage, away)
        assert steps_of(away) == list(range(STEPS))
        Store(Repository(storage)).gc(keep_last=1, min_age=0, wait=0, revoke_after=0)
        assert steps_of(storage) == [STEPS - 1]
    assert len(shown) == STEPS + 1 or not full


def caught_up(storage: ObjectStore, away: ObjectStore) -> None:
    """Run one pass of a mirror."""
    mirror.Mirror(Repository(storage), Repository(away))._catch_up(mirror._State())


def steps_of(storage: ObjectStore) -> list[int]:
    """Check that all visible checkpoints are complete and verified. Return their steps."""
    store = Store(Repository(storage))
    found = [step for _, step in steps(store)] if store.repository.exists() else []
    if found:
        check(store, found)
    return found
