"""After a power loss at any instant, returned saves exist, only complete checkpoints are visible, and work continues.

Processes save, thin, forget and run gc, one after the other. Some are killed, and leave names that are not durable.
The test checks the possible contents of the disk after a power loss at many instants, with and without the host's
cache.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from casckpt.errors import CasckptError
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.power import Disk, Killed
from tests.support.saves import BLOB, CELL, cells, same_state
from tests.support.tally import tally

pytestmark = pytest.mark.kill

SEEDS, MANY, AT_MOST = 8, 300, 5
DROP = "optim.*"


def state(step: int) -> dict[str, Any]:
    """Return a state in which some values are equal in all steps, and others are new. New values have their
    own files."""
    model = {"kept": cells(20, seed=1), "new": cells(2, seed=step)}
    return {"model": model, "optim": {"m": cells(20, seed=50 + step)}, "step": step}


def opened(folder: Path, cache: Path) -> Store:
    return Store(Repository(LocalStore(folder), cache))


@dataclass
class User:
    """A user who acts randomly. ``there``: the steps that must survive.

    The user removes a step from ``there`` before forgetting it in the store.
    """

    dice: random.Random
    there: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)

    def act(self, store: Store) -> None:
        getattr(self, self.dice.choice(["save", "save", "rotate", "thin", "forget", "collect"]))(store)

    def save(self, store: Store) -> None:
        step = max(self.begun, default=-1) + 1
        self.begun.add(step)
        store.save(state(step), run="run", step=step, threads=2)
        self.there.add(step)

    def rotate(self, store: Store) -> None:
        self.there &= set(sorted(self.begun)[-2:])
        store.gc(keep_last=2, min_age=0, wait=0, revoke_after=0)

    def collect(self, store: Store) -> None:
        store.gc(min_age=0, wait=0, revoke_after=0)

    def thin(self, store: Store) -> None:
        if store.checkpoints():
            store.thin(drop=DROP, keep_last=1)

    def forget(self, store: Store) -> None:
        if self.there:
            step = self.dice.choice(sorted(self.there))
            self.there.discard(step)
            store.forget(f"run@{step}")


def lives(folder: Path, dice: random.Random) -> tuple[Disk, Path]:
    """Run up to three processes, one after the other, that use the same store."""
    root, caches = folder / "store", folder / "caches"
    root.mkdir(parents=True)
    user = User(dice)
    disk = Disk(root, folder / "inodes", lambda: frozenset(user.there))
    with disk.watched():
        opened(root, caches / "0").create(cell_bytes=CELL, blob_bytes=BLOB)
        for number in range(dice.randint(1, 3)):
            disk.keep = lambda call: dice.random() < 0.02
            disk.dies_at = disk.calls + dice.randrange(5, 300)
            try:
                store = opened(root, caches / str(number % 2))
                for _ in range(12):
                    user.act(store)
            except Killed:
                pass
            disk.dies_at = disk.calls  # ends its remaining threads
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join(30)
            disk.dies_at = None
        disk.kept.append(disk.now())
    return disk, caches


def wrongs(folder: Path, cache: Path, there: frozenset[int]) -> list[str]:
    """Describe the broken guarantees."""
    found = []
    store = opened(folder, cache)
    visible = {one.step: one for one in store.checkpoints()}
    found += [f"run@{step} was saved, and is not there" for step in there - visible.keys()]
    try:
        for step, one in visible.items():
            wanted, keys = state(step), None
            if one.dropped is not None:
                wanted.pop("optim")
                keys = ["model.*", "step"]
            if not same_state(store.read(one, keys=keys), wanted):
                found.append(f"run@{step} is not what was saved")
        if (verified := store.verify()).is_damaged:
            found.append(str(verified))
        User(random.Random(0), begun={99}).save(store)
        store.gc(keep_last=2, min_age=0, wait=0, revoke_after=0)
        if not same_state(store.read("run@100"), state(100)):
            found.append("what is saved afterwards is not what was saved")
    except CasckptError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def after_power_was_lost(folder: Path, seed: int) -> list[str]:
    """Return the guarantees that were broken at some instants of some runs."""
    dice = random.Random(seed)
    disk, caches = lives(folder, dice)
    found = []
    for number, instant in enumerate(dice.sample(disk.kept, min(AT_MOST, len(disk.kept)))):
        image, cache = folder / f"image{number}", folder / f"cache{number}"
        how = disk.lose_power(instant, image, dice)
        if dice.random() < 0.5 and caches.exists():
            shutil.copytree(caches / "0", cache)
        found += [f"seed {seed}, {number}, {how} happened: {text}" for text in wrongs(image, cache, instant.told)]
    return found


@pytest.mark.parametrize("part", range(4))
def test_everything_present_after_a_power_loss_is_complete(tmp_path: Path, full: bool, part: int) -> None:
    found = []
    for seed in range(part, MANY if full else SEEDS, 4):
        found += after_power_was_lost(tmp_path / str(seed), seed)
        tally("power lost", len(list((tmp_path / str(seed)).glob("image*"))))
        shutil.rmtree(tmp_path / str(seed))
    assert found == []


BROKEN: dict[str, Callable[[str], bool]] = {
    "a commit": lambda key: key.startswith("commits/"),
    "a manifest": lambda key: key.endswith(".manifest"),
    "a transaction": lambda key: key.startswith("transactions/"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_power_loss_test_detects_missing_syncs_of_folders(tmp_path: Path, what: str) -> None:
    put = LocalStore.put

    def unsettled(self: LocalStore, key: str, data: Any, *, settle: bool = True) -> None:
        put(self, key, data, settle=settle and not BROKEN[what](key))

    with patch.object(LocalStore, "put", unsettled):
        assert any(after_power_was_lost(tmp_path / str(seed), seed) for seed in range(30))
