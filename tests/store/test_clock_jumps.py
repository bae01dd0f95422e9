"""The clock of a host is set back or ahead by hours, at each storage call of a save, a load, a gc and a watch.

Nothing is lost, nothing is partly visible, and what a host does later is correct.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casckpt.history.leases import Lease
from casckpt.history.tags import list_tags
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.store.store import Store
from tests.support.faulty import METHODS, Call, FaultyStore, call_first, look_on
from tests.support.gcs import run_gc
from tests.support.repositories import Ticks, commit_bare, memory
from tests.support.saves import BLOB, CELL, cells, same_state, steps
from tests.support.tally import tally

HOUR, DAY = 3600.0, 24 * 3600.0
JUMPS = {
    "ahead by hours": 5 * HOUR,
    "ahead by a year": 400 * DAY,
    "back by hours": -5 * HOUR,
    "back by a year": -400 * DAY,
}
EVERY = 6
"""By default, the clock jumps at every sixth call, each time in a different way."""


def host(storage: ObjectStore, cache: Path, clock: Ticks | None = None) -> Store:
    """Open the store as a host with its own clock and cache."""
    store = Store(Repository(storage, cache, clock=clock or Ticks()))
    store.create(cell_bytes=CELL, blob_bytes=BLOB)
    return store


def state(step: int) -> dict[str, Any]:
    return {"kept": cells(6, seed=1), "new": cells(6, seed=step)}


class Host:
    """A store on a host whose clock jumps once, at the given storage call, and the same store on a different host."""

    def __init__(self, jump: float, at: int, folder: Path) -> None:
        self.clock, self.faulty = Ticks(), FaultyStore(memory(near=False))
        self.store = host(self.faulty, folder / "mine", self.clock)
        self.other = host(self.faulty.inner, folder / "other")
        for step in range(3):
            self.store.save(state(step), step=step)
        self._before, self._jump, self._left = len(self.faulty.calls), jump, at
        self.faulty.inject(*(look_on(method, self._count, times=10_000) for method in METHODS))

    def _count(self, _: object) -> None:
        if self._left == 0:
            self.clock.advance(self._jump)
        self._left -= 1

    @property
    def calls(self) -> int:
        """The number of storage calls since the first saves."""
        return len(self.faulty.calls) - self._before


def sweep(jump: float, full: bool, tmp_path: Path, play: Callable[[Host], object]) -> int:
    """Play on a new host again and again, until its clock has jumped at each call. Return the number of jumps."""
    first, stride = (0, 1) if full else (EVERY * list(JUMPS.values()).index(jump), EVERY * len(JUMPS))
    at, calls, jumps = first, first + 1, 0
    while at < calls:
        here = Host(jump, at, tmp_path / str(at))
        play(here)
        jumps += at < here.calls
        calls, at = here.calls, at + stride
    tally("clocks that jump", jumps)
    return jumps


@pytest.fixture(params=JUMPS.values(), ids=[*JUMPS])
def jump(request: pytest.FixtureRequest) -> float:
    seconds: float = request.param
    return seconds


def test_a_save_survives_a_clock_that_jumps(jump: float, tmp_path: Path, full: bool) -> None:
    def play(here: Host) -> None:
        saved = here.store.save(state(3), step=3)
        assert saved.stats is not None
        assert saved.stats.seconds >= 0
        assert steps(here.other) == [("default", step) for step in range(4)]
        assert same_state(here.other.read("default@latest"), state(3))
        here.other.save(state(4), step=4)
        assert same_state(here.store.read("default@latest"), state(4)), "the latest is what was saved last"
        assert not here.store.transactions()

    assert sweep(jump, full, tmp_path, play)


def test_a_load_survives_a_clock_that_jumps(jump: float, tmp_path: Path, full: bool) -> None:
    def play(here: Host) -> None:
        fresh = Store(Repository(here.faulty, clock=here.clock))
        assert same_state(fresh.read("default@latest"), state(2))
        assert [told.checkpoint.step for told in fresh.watch("default", after="start", timeout=0)] == [0, 1, 2]

    assert sweep(jump, full, tmp_path, play)


def test_gc_keeps_what_it_must_keep_although_its_clock_jumps(jump: float, tmp_path: Path, full: bool) -> None:
    """Only a clock that is ahead by more than the hour of slack ends leases of other hosts."""

    def play(here: Host) -> None:
        here.other.tag("good", "default@0")
        with here.other.lease("default@1") as leased:
            here.store.gc(keep_last=1, min_age=0, wait=0)
            if jump < 0:
                assert same_state(here.other.read(leased), state(1))
        for step in (0, 2):
            assert same_state(here.other.read(f"default@{step}"), state(step))
        here.store.save(state(3), step=3)
        here.store.gc(keep_last=1, min_age=0, wait=0)
        assert steps(here.other) == [("default", 0), ("default", 3)]
        assert same_state(here.other.read("default@3"), state(3))
        assert not here.other.verify().is_damaged

    assert sweep(jump, full, tmp_path, play)


def test_a_save_on_a_different_host_survives_a_gc_whose_clock_jumps(jump: float, tmp_path: Path, full: bool) -> None:
    """A clock that jumps ahead makes a save appear silent. It is revoked, and then repeated."""

    def play(here: Host) -> None:
        here.other.forget("default@0")

        def collect(_: Call) -> None:
            run_gc(here.store.repository, wait=1.0)

        slow = FaultyStore(here.faulty.inner, [call_first("put", collect, key="objects/*.manifest")])
        saving = host(slow, tmp_path / "saving")
        saving.save(state(3), step=3)
        assert steps(here.other)[-1] == ("default", 3)
        assert same_state(here.other.read("default@3"), state(3))
        assert not here.other.verify().is_damaged

    assert sweep(jump, full, tmp_path, play)


@pytest.mark.parametrize("back", [0.0, 5 * HOUR])
def test_a_renewed_lease_does_not_end_early_if_the_clock_of_its_holder_is_set_back(back: float) -> None:
    """It lasts at least as long as this host's uptime shows."""
    clock, storage = Ticks(step=0), memory()
    repo, others = Repository(storage, clock=clock), Repository(storage, clock=Ticks(step=0))
    repo.create()
    commit = commit_bare(repo)
    with Lease(repo, commit, HOUR) as lease:
        before = list_tags(others).tags
        clock.advance(-back)
        assert lease.renew()
        after = list_tags(others).tags
    assert before.keys() == after.keys()
    assert all((after[name].expires or 0) > (before[name].expires or 0) for name in before)
