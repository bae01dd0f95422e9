"""A trainer that writes folders, and a watcher that stores them. Both are killed at random."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

import casckpt
from casckpt.base.digest import hex_digest
from casckpt.frontends.files.watching import watch_files
from tests.support.afresh import afresh
from tests.support.stored_folder import described

RUN, KEPT, MARKER = "r", 3, "trainer_state.json"
SETTLE = 0.1  # seconds


def digest(folder: Path) -> str:
    """A digest of what is in a folder, without the marker."""
    return hex_digest(json.dumps([one for one in described(folder) if one["path"] != MARKER]).encode())


def whole(folder: Path) -> list[Path]:
    """The checkpoints that the trainer has completed, the oldest first."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{MARKER}")]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def train(folder: Path, log: Path) -> None:
    """Continue from the last complete checkpoint, as the Trainer of Transformers does."""
    while True:
        step = int(whole(folder)[-1].name.split("-")[1]) + 1 if whole(folder) else 0
        made = folder / f"checkpoint-{step}"
        made.mkdir(parents=True, exist_ok=True)
        for name in ("model.pt", "optimizer.pt", "rng.pt"):
            time.sleep(random.choice([0, 0, 2]) * SETTLE)
            torch.save({"w": torch.randint(0, 255, (random.choice([100, 100_000]),), dtype=torch.uint8)}, made / name)
        with log.open("a") as lines:
            lines.write(f"{step} {digest(made)}\n")
        (made / MARKER).write_text("{}")
        for old in whole(folder)[:-KEPT]:
            shutil.rmtree(old)


def watch(store: Path, folder: Path) -> None:
    """Store what is complete until killed."""
    for _ in watch_files(store, folder, run=RUN, settle=f"{SETTLE}s"):
        pass


def kill_at_random(seed: int, kills: int, folder: Path, store: Path, log: Path) -> None:
    """Start the trainer and the watcher, and kill either of them again and again."""
    draw = random.Random(seed)
    roles: list[tuple[Callable[..., None], tuple[Path, ...]]] = [(train, (folder, log)), (watch, (store, folder))]
    running = [afresh().Process(target=role, args=arguments) for role, arguments in roles]
    for process in running:
        process.start()
    for _ in range(kills):
        time.sleep(draw.uniform(0.1, 0.8))
        number = draw.randrange(2)
        running[number].kill()
        running[number].join()
        assert running[number].exitcode == -9, f"{roles[number][0].__name__} ended by itself"
        time.sleep(draw.choice([0, 3]) * SETTLE)
        running[number] = afresh().Process(target=roles[number][0], args=roles[number][1])
        running[number].start()
    opened = casckpt.open(store)
    while not (opened.exists() and opened.checkpoints(RUN)):  # on a busy machine, all watchers may have died before
        time.sleep(SETTLE)
    for process in running:
        process.kill()
        process.join()
