"""A training run for ckpt-chaos, which kills it at each change of its folder and then runs it again.

``python -m tests.support.chaos casckpt FOLDER`` trains, saves after each step, and runs a gc after each save.
``overwrite`` saves with `torch.save` over the previous file instead. Both resume from the newest checkpoint.

ckpt-chaos learns of changes from Python's audit events, and only if they name a path below FOLDER. casckpt names files
relative to the descriptor of their folder, so `announce` raises an event with the full path before each such call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import casckpt
from casckpt.storage.local import syscalls

STEPS = 2
FINAL = "final.pt"


def announce(root: Path) -> None:
    """Raise an audit event before each call of casckpt that changes the store, and write each file in two halves."""

    def announced(event: str, call: Callable[..., Any], folder: Callable[..., int | None]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            fd = folder(*args, **kwargs)
            if fd is not None:
                sys.audit(event, _shown(root, fd), None, os.O_WRONLY)
            return call(*args, **kwargs)

        return wrapped

    for name, event in (("mkdir", "os.mkdir"), ("unlink", "os.remove")):
        setattr(os, name, announced(event, getattr(os, name), lambda *_, dir_fd=None: dir_fd))
    syscalls.link_unnamed = announced("os.rename", syscalls.link_unnamed, lambda _, folder, name: folder)
    os.pwrite = partial(_in_halves, announced("open", os.pwrite, lambda fd, data, at: fd))


def _shown(root: Path, fd: int) -> str:
    """Return the path of a folder, or of the folder of an unnamed file, without the names that differ in each run."""
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    path = path if path.is_dir() else path.parent
    return str(root.joinpath(*path.relative_to(root).parts[:1]) if path.is_relative_to(root) else path)


def _in_halves(pwrite: Callable[..., int], fd: int, data: memoryview, at: int) -> int:
    half = len(data) // 2
    return pwrite(fd, data[: half - half % 4096 or half] if half and at == 0 else data, at)


class InStore:
    """Checkpoints in a store, of which a gc keeps the newest."""

    def __init__(self, folder: Path) -> None:
        announce(folder / "store")
        self.store = casckpt.open(folder / "store")

    def resume(self, state: dict[str, Any]) -> int:
        """Load the newest checkpoint, if there is one. Return its step, or 0."""
        if not self.store.exists() or not self.store.checkpoints():
            return 0
        return self.store.load(state, "latest").step

    def save(self, state: dict[str, Any], step: int) -> None:
        self.store.save(state, step=step)

    def clean_up(self) -> None:
        self.store.gc(keep_last=1, min_age=0)


class Overwriting:
    """One file, which each save overwrites."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "newest.pt"

    def resume(self, state: dict[str, Any]) -> int:
        """Load the file, if it exists. Return its step, or 0."""
        if not self.path.exists():
            return 0
        saved = torch.load(self.path)
        for name, part in state.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    def save(self, state: dict[str, Any], step: int) -> None:
        torch.save({name: part.state_dict() for name, part in state.items()} | {"step": step}, self.path)

    def clean_up(self) -> None:
        """Do nothing."""


def train(checkpoints: InStore | Overwriting, folder: Path) -> None:
    """Train from the newest checkpoint to the last step, and write the result to FINAL.

    After each save, a file ``saved-STEP`` states that the save returned.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(600, 600)  # more than 1 MiB, which casckpt writes with direct I/O
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = {"model": model, "optim": optim}
    first = checkpoints.resume(state)
    print(f"resumed from step {first}", flush=True)  # noqa: T201 - ckpt-chaos reads it
    for step in range(first + 1, STEPS + 1):
        x = torch.randn(4, 600, generator=torch.Generator().manual_seed(step))
        optim.zero_grad()
        (model(x) - x).square().mean().backward()
        optim.step()
        checkpoints.save(state, step)
        (folder / f"saved-{step}").write_text("the save returned")
        checkpoints.clean_up()
    torch.save(model.state_dict(), folder / FINAL)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[2])
    FOLDER.mkdir(exist_ok=True)
    train(InStore(FOLDER) if sys.argv[1] == "casckpt" else Overwriting(FOLDER), FOLDER)
