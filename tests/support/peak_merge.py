"""How much memory a merge needs beyond the imports, measured by the kernel in a separate process.

``python -m tests.support.peak_merge FOLDER MIB`` prints the peak MiB of a mean of three checkpoints, each of which is
one tensor of that size.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from casckpt.store.opening import open as open_store
from tests.support.killed_saves import forked
from tests.support.peak import MIB, taken


def _fill(folder: Path, mib: int) -> None:
    store = open_store(folder)
    for step in range(3):
        store.save({"w": torch.randn(mib * MIB // 4)}, run="a", step=step)


def main(folder: Path, mib: int) -> None:
    for name, size in (("warm", 1), ("store", mib)):
        if forked(lambda name=name, size=size: _fill(folder / name, size)):  # type: ignore[misc] # in a loop
            raise SystemExit("the saves failed")
    open_store(folder / "warm").merge("a@..", run="m", step=1)
    store = open_store(folder / "store")
    print(f"{taken(lambda: store.merge('a@..', run='m', step=1)):.1f}")  # noqa: T201 - its parent reads it


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    main(Path(sys.argv[1]), int(sys.argv[2]))
