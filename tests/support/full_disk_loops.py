"""A training on a small file system that another program fills at random moments, and empties again.

``python -m tests.support.full_disk_loops KIND LACK MOMENTS VALUES SEED FOLDER`` saves ``VALUES`` random values at each
step. It fails if a save with room fails, anything is lost, or anything remains. KIND and LACK: see `full_disks`. If
LACK depends on the user, two users are two ranks, and only the last one meets the full disk. The exit status is 2 if
this cannot be tried here.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from casckpt.errors import StorageError
from casckpt.frontends.trainer import Checkpointer
from casckpt.storage.local import store as local_store
from tests.support.full_disks import USERS, fill, mount, opened, run
from tests.support.ranks import Pool, outcome_of

log = logging.getLogger(__name__)

STATES = 3.3  # have room
CLEANED_UP = 12.0  # seconds


@dataclass(frozen=True)
class Plan:
    """What to try. ``values``: random ones, which each rank saves at each step."""

    kind: str
    lack: str
    moments: int
    values: int
    seed: int

    @property
    def ranks(self) -> int:
        return 2 if self.lack in ("reserved", "user quota") else 1


@dataclass
class Other:
    """Another program, with a file of its own."""

    at: Path
    lack: str
    made: list[Path] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.Thread)

    def start(self, after: float) -> None:
        self.thread = threading.Thread(target=self._fill, args=[after])
        self.thread.start()

    def _fill(self, after: float) -> None:
        time.sleep(after)
        self.made = fill(self.at, self.lack)

    def go(self) -> None:
        self.thread.join()
        for path in self.made:
            path.unlink()


class Training:
    """The saves of one rank. ``kept``: the steps that the rules keep. ``failed``: how many saves failed."""

    def __init__(self, rank: int, plan: Plan, at: Path) -> None:
        self.rank, self.plan, self.store = rank, plan, opened(at, at.parent / f"cache{rank}")
        self.other = Other(at, plan.lack) if rank == plan.ranks - 1 else None
        self.chance, self.steps, self.kept, self.failed = Random(plan.seed), count(), list[int](), 0

    def together(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found = [value] * self.plan.ranks
        if len(found) > 1:
            dist.all_gather_object(found, value)
        return found

    def state(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(2 * step + self.rank)
        return {f"w{self.rank}": torch.randn(self.plan.values, generator=generator)}

    def save(self, checkpointer: Checkpointer, *, must: bool = False) -> None:
        """Save the next step. If that fails, it fails on all ranks, because of the full disk."""
        step, how = next(self.steps), self.chance.choice(("save", "save_async"))

        def save() -> None:
            getattr(checkpointer, how)(step, self.state(step))
            checkpointer.wait()

        error = outcome_of(save)
        assert error is None or (isinstance(error, StorageError) and error.full), error
        assert len(set(self.together(error is None))) == 1
        if error is None:
            self.kept = [*self.kept, step][-2:]
        elif must:
            raise error
        else:
            self.failed += 1

    def check_visible(self, *, all_of_them: bool) -> None:
        steps = [one.step for one in self.store.checkpoints("sft")]
        assert steps[0 if all_of_them else -len(self.kept) :] == self.kept, (steps, self.kept)

    def check_values(self) -> None:
        for step in self.kept:
            state = self.state(step)
            read = {name: torch.empty_like(value) for name, value in state.items()}
            self.store.load(read, f"sft@{step}")
            assert all(torch.equal(read[name], value) for name, value in state.items()), step

    def check_leftovers(self, checkpointer: Checkpointer) -> None:
        """Without a gc or a save of anybody else, nothing remains but what the kept checkpoints need."""
        checkpointer._janitor.close()
        wanted = {one.commit.txid for one in self.store.checkpoints("sft")}
        end, path, left = time.monotonic() + CLEANED_UP, Path(self.store.url), {""}
        while self.rank == 0 and left and time.monotonic() < end:
            left = {*os.listdir(path / "objects")} - wanted
            if (path / "transactions").exists():
                left |= {*os.listdir(path / "transactions")}
            time.sleep(0.05)
        assert not any(self.together(left if self.rank == 0 else ())), left

    def meet(self, checkpointer: Checkpointer, after: float) -> None:
        """Save while the disk becomes full, at most ``after`` seconds later, and when it has room again."""
        filled_before, checked_full, checked_free = (self.chance.random() < share for share in (0.3, 0.2, 0.2))
        after *= self.chance.random()
        if self.other:
            self.other.start(after)
            if filled_before:
                self.other.thread.join()
        self.together(None)
        for _ in range(self.chance.randint(1, 2)):
            self.save(checkpointer)
            self.check_visible(all_of_them=False)
        if checked_full:
            self.check_leftovers(checkpointer)
        self.check_values()
        if self.other:
            self.other.go()
        self.together(None)
        self.save(checkpointer, must=True)
        self.check_visible(all_of_them=True)
        self.check_values()
        if checked_free:
            self.check_leftovers(checkpointer)


def train(rank: int, _: int, plan: Plan, at: Path) -> int:
    """Return how many saves failed."""
    if plan.ranks > 1:
        os.setgroups([])
        os.setgid(USERS[0])
        os.setuid(USERS[rank])
    training, begun, events = Training(rank, plan, at), time.monotonic(), list[str]()
    with Checkpointer(training.store, run="sft") as without_rules:
        for _ in range(3):
            training.save(without_rules, must=True)
    seconds = (time.monotonic() - begun) / 3
    rules: Any = {"max_checkpoints": 2, "gc": True, "on_event": lambda event: events.append(event.kind)}
    with Checkpointer(training.store, run="sft", **rules) as checkpointer:
        checkpointer.resume(training.state(0))
        training.save(checkpointer, must=True)
        if rank == 0 and plan.lack != "inodes":
            assert events[:3] == ["resumed", "forgotten", "saved"], events  # it was tried twice
        for _ in range(plan.moments):
            training.meet(checkpointer, 1.5 * seconds)
        training.check_leftovers(checkpointer)
    assert not training.store.verify().is_damaged
    return training.failed


def share(path: Path) -> None:
    """Give a folder to the group of `USERS`, as docs/running.md says."""
    os.chown(path, -1, USERS[0])
    path.chmod(0o2770)
    entries = [number for tag, may in ((1, 7), (4, 7), (32, 0)) for number in (tag, may, 0xFFFFFFFF)]
    os.setxattr(path, "system.posix_acl_default", struct.pack("<I" + "HHI" * 3, 2, *entries))


def main(plan: Plan, folder: Path) -> None:
    """Train on a new file system."""
    shared = 2 if plan.lack == "reserved" else 1
    at = mount(plan.kind, plan.lack, folder, int(STATES * 4 * plan.values * shared) + (1 << 20))
    if plan.kind == "tmpfs":
        local_store._FREEING = 0.5  # it frees space at once
    folder.chmod(0o755)
    caches = [at.parent / f"cache{rank}" for rank in range(plan.ranks)]
    for path in (at, at / "store", *caches):
        path.mkdir(exist_ok=True)
        if plan.ranks > 1:
            share(path)
    for path in (Path("/dev/shm"), *(caches if plan.ranks == 1 else ())):
        run("mount", "-t", "tmpfs", "-o", "size=64k", "none", path)
    if plan.ranks == 1:
        failed = train(0, 1, plan, at)
    else:
        with Pool(folder, 3000.0) as pool:
            failed = pool.run(plan.ranks, train, plan, at, timeout=600, tcp=True)[0]
    log.info("%d saves failed at %d moments", failed, plan.moments)
    assert failed >= plan.moments // 5, failed


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    main(Plan(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])), Path(sys.argv[6]))
