"""How much memory a save and a load need beyond the state, measured by the kernel in a separate process.

``python -m tests.support.peak FOLDER MIB`` prints the peak MiB of a save, a verified load and a read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store

MIB = 1 << 20


def high_water() -> float:
    """Return the peak memory of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this kernel does not count memory")


def taken(call: Callable[[], Any]) -> float:
    """Return the MiB above the previous peak."""
    before = high_water()
    call()
    return high_water() - before


def _state(mib: int) -> dict[str, torch.Tensor]:
    """Return a state, half of which is contiguous and half transposed. No two cells are equal."""
    state = {"plain": torch.zeros(mib // 2, MIB // 4), "transposed": torch.zeros(MIB // 4, mib // 2).t()}
    for sign, tensor in zip((1, -1), state.values(), strict=True):
        for row in range(tensor.shape[0]):
            tensor[row] = torch.arange(1, tensor.shape[1] + 1) * (sign * (row + 1))
    return state


def main(folder: Path, mib: int) -> None:
    store = Store(Repository(LocalStore(folder / "store"), folder / "cache"))
    store.create(cell_bytes=64 << 10, blob_bytes=1 << 20)
    warm = {"w": torch.randn(MIB), "t": torch.randn(1024, 1024).t()}
    store.save(warm, run="warm", step=0, threads=2)
    store.load(warm, "warm@0", threads=2)
    store.read("warm@0", threads=2)
    state = _state(mib)
    saved = taken(lambda: store.save(state, step=1, threads=2))
    loaded = taken(lambda: store.load(state, "default@1", threads=2))
    again = taken(lambda: store.save(state, step=2, threads=2))
    print(f"{saved:.1f} {loaded:.1f} {again:.1f}")  # noqa: T201 - its parent reads it


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
