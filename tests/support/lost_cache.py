"""Power losses on LazyFS, a file system of others that keeps what was written in its memory until it is synced.

``python -m tests.support.lost_cache LAZYFS FOLDER ROUNDS SEED`` uses the checkout LAZYFS, in which LazyFS was built. In
each round, a job of `plain_jobs`, or a loop of saves and gcs, runs on a new mount, and is killed at a random instant,
or ends. Then LazyFS forgets what was not synced. What is left on the disk must pass the job's checks. What has ended
leaves nothing unsynced in a store, except prepared files. LazyFS never loses names. Needs root.

LazyFS (at a47a5bae) loses synced bytes of direct writes, also those of a program that only writes and syncs one file.
So the jobs write and read through the page cache.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final

import torch

from casckpt.storage.local import reader, syscalls
from tests.support.killed_saves import check_clean, forked
from tests.support.plain_jobs import JOBS, Place, again, check, check_stores, state, visible
from tests.support.tally import tally

LOOP: Final = "saves and gcs"
LIMIT: Final = 120  # seconds for each process
FIRST, LAST, KEEP = 10, 16, 3  # the steps of a loop, and how many checkpoints its gc keeps
_SETTINGS = """\
[faults]
fifo_path="{fifo}"
[cache]
apply_eviction=false
[cache.simple]
custom_size="128mb"
blocks_per_page=1
[filesystem]
log_all_operations=false
logfile=""
"""


class LazyFs:
    """A mounted LazyFS. ``root``: the folder that holds what it has written. ``at``: where it is mounted."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.root, self.at, self._fifo, settings = (folder / name for name in ("root", "at", "fifo", "settings"))
        for path in (self.root, self.at):
            path.mkdir(exist_ok=True)
        settings.write_text(_SETTINGS.format(fifo=self._fifo))
        given = ["--config-path", str(settings), "-o", "allow_other,modules=subdir", "-o", f"subdir={self.root}", "-f"]
        program = str(checkout / "lazyfs" / "build" / "lazyfs")
        self._process = subprocess.Popen(
            [program, str(self.at), *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout
        self._told: IO[str] = self._process.stdout
        self._until("waiting for fault commands")

    def _until(self, *words: str) -> list[str]:
        lines = [self._told.readline()]
        while not any(word in lines[-1] for word in words):
            assert lines[-1], f"LazyFS has ended: {lines}"
            lines.append(self._told.readline())
        return lines

    def _order(self, command: str, *answers: str) -> list[str]:
        self._fifo.write_text(f"lazyfs::{command}\n")
        return self._until(*answers)

    def lose(self) -> None:
        """Forget what was not synced."""
        self._order("clear-cache", "cache is cleared")

    def unsynced(self) -> list[str]:
        """Return the files with bytes that were not synced."""
        lines = self._order("unsynced-data-report", "total number of bytes", "all data blocks are synced")
        return [line.rstrip().rpartition("file: ")[2].strip("'") for line in lines if "=> file: " in line]

    def end(self) -> None:
        subprocess.run(["umount", self.at], check=True)
        self._process.communicate(timeout=LIMIT)


@contextmanager
def mounted(checkout: Path, folder: Path) -> Iterator[LazyFs]:
    lazyfs = LazyFs(checkout, folder)
    try:
        yield lazyfs
    finally:
        lazyfs.end()


def loop(place: Place, told: Path) -> int:
    """Save steps, and collect all but the newest. Before each gc, and after each save, say so in ``told``."""
    with told.open("a", buffering=1) as file:
        store = place.opened(place.store)
        for step in range(FIRST, LAST):
            store.save(state(step), step=step)
            file.write(f"saved {step}\n")
            if step % 2:
                file.write(f"gc {step}\n")
                store.gc(keep_last=KEEP, min_age=0, wait=0)
    return 0


def check_loop(place: Place, told: str) -> None:
    """Check that each save that returned is there, unless a gc could remove it, and that work can go on."""
    store, there = place.opened(place.store), {1, 2, 3}
    for what, step in (line.split() for line in told.splitlines()):
        there = {*there, int(step)} if what == "saved" else set(sorted(there)[-KEEP:])
    assert {step for _, step in visible(store)} >= there, (visible(store), there)
    check_stores(place)
    store.save(state(LAST), step=LAST)
    assert not store.gc(keep_last=KEEP, min_age=0, wait=0).waiting
    check_clean(store)
    check_stores(place)
    assert LAST in {step for _, step in visible(store)}


def run(name: str, place: Place, told: Path) -> int:
    """Run a job or the loop. Return its status."""
    return loop(place, told) if name == LOOP else again(name, place)[0]


def started(call: Callable[[], int], after: float) -> tuple[bool, float]:
    """Run ``call`` in a child that is killed after some seconds. Report whether it ended with 0, and its seconds."""
    began, child = time.monotonic(), os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_REAL, after)  # there is no handler, so the signal ends the process
        os._exit(call())
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, f"it failed with {os.waitstatus_to_exitcode(status)}"
    return status == 0, time.monotonic() - began


def strike(checkout: Path, base: Place, folder: Path, name: str, after: float) -> str:
    """Run a job until it ends or is killed, and lose what was not synced. Return how it ended."""
    folder.mkdir()
    told = folder / "told"
    told.touch()
    shutil.copytree(base.folder, folder / "root" / "job")
    with mounted(checkout, folder) as lazyfs:
        place = Place(lazyfs.at / "job")
        is_done, seconds = started(partial(run, name, place, told), after)
        unsynced = lazyfs.unsynced()
        lazyfs.lose()
    stored = [path for path in unsynced if "/job/store/" in path or "/job/away/" in path]
    assert not is_done or all("/.spare/" in path for path in stored), stored
    place = Place(folder / "root" / "job")
    checks = partial(check_loop, place, told.read_text()) if name == LOOP else partial(check, name, place, is_done)
    assert not forked(lambda: (signal.alarm(LIMIT), checks())), f"{name}, killed after {after:.3f} s: see above"
    shutil.rmtree(folder)
    if after >= LIMIT:
        return f"{seconds}"
    tally("lazyfs: unsynced data lost")
    return f"{name}: {'ended' if is_done else 'killed'}{', unsynced data was lost' if stored else ''}"


def sweep(checkout: Path, folder: Path, rounds: int, seed: int) -> None:
    """Run all jobs once to their end, then ``rounds`` drawn ones until an instant that is drawn, too."""
    base, dice, ended = Place(folder / "base"), random.Random(seed), Counter[str]()
    assert not forked(base.fill)
    names = (*JOBS, LOOP, LOOP)
    seconds = {name: float(strike(checkout, base, folder / name.replace(" ", "-"), name, LIMIT)) for name in names}
    for number in range(rounds):
        name = dice.choice(names)
        ended[strike(checkout, base, folder / f"{number}", name, dice.uniform(0.01, 1.2 * seconds[name]))] += 1
    for what, count in sorted(ended.items()):
        sys.stdout.write(f"{what}: {count}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    syscalls.set_direct = lambda *_: False
    reader.is_cached = lambda *_: True
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    sweep(Path(sys.argv[1]), Path(sys.argv[2]).resolve(), int(sys.argv[3]), int(sys.argv[4]))
