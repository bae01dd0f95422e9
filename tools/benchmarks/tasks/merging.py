"""Merges of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import Measured, Meter
from benchmarks.tasks.limits import prepare
from benchmarks.values import differing
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    import torch

    from benchmarks.worker import Here
    from casckpt.store.store import Store

_RUN, _TENSORS = "bench", 8


def make(here: Here, *, folder: str, dtype: str, nbytes: int, count: int) -> int:
    """Save ``count`` checkpoints of ``nbytes`` bytes that differ in every cell. Return the size of one."""
    import torch

    store, draw = _open(folder), torch.Generator().manual_seed(1)
    kind = getattr(torch, dtype)
    length = nbytes // _TENSORS // kind.itemsize
    state = {f"w{number}": torch.randn(length, generator=draw).to(kind) for number in range(_TENSORS)}
    total = {key: torch.zeros(length) for key in state}
    for step in range(count):
        store.save({key: tensor.roll(step) for key, tensor in state.items()}, run=_RUN, step=step)
        for key, tensor in state.items():
            total[key] += tensor.roll(step).float() * (1 / count)
    here.kept[folder] = {key: value.to(kind) for key, value in total.items()}
    return sum(tensor.nbytes for tensor in state.values())


def mean(here: Here, *, folder: str, cache: str) -> Measured:
    """Save the mean of all checkpoints, compare it with torch's, and remove it."""
    prepare(here, Path(folder), cache)
    store = _open(folder)
    meter = Meter()
    merged = store.merge(f"{_RUN}@..", run="mean", step=0)
    measured = meter.stop()
    wanted: dict[str, torch.Tensor] = here.kept[folder]
    wrong = differing(wanted, store.read(merged))
    if wrong:
        raise WrongBytes(f"the mean differs from torch's in {wrong}")
    store.forget_now(merged)
    store.gc(min_age=0, wait=0)
    return measured


def _open(folder: str) -> Store:
    import casckpt

    return casckpt.open(folder, cache_dir=folder + ".cache")
