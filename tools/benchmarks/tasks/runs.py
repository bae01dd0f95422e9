"""Versions of a trace, saved to and loaded from a store in a folder or behind a connection of limited speed."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import files, values
from benchmarks.measure import Clock, Measured
from benchmarks.tasks.deltas import trace_of
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    import torch

    from benchmarks.traces import Trace
    from benchmarks.worker import Here
    from casckpt.storage.base import Reader, Traits
    from casckpt.store.store import Store

_RUN, _KEPT, _GIB = "run", 8, 1 << 30
_SHIFT = 12_347  # elements; as a result, copies of the matrices do not share any cells
_NUMBERS = itertools.count()


@dataclass
class _Paced:
    """A folder behind a connection that all requests share. Only blobs and ranged reads wait for it.

    ``read``: the number of blob bytes that were read.
    """

    inner: Any
    rate: float
    read: int = 0
    _free: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    @property
    def traits(self) -> Traits:
        """Return the traits of a bucket."""
        from casckpt.storage.base import Traits

        return Traits(remote=True, read_gap=1 << 20, parallel=8, exclusive=True, uploads=4)

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        """Wait for the connection, and put."""
        self.wait(len(data))
        self.inner.put(key, data, settle=settle)

    @contextmanager
    def open(self, key: str, *, shared: bool = False) -> Iterator[Reader]:
        """Open an object for reads that wait for the connection."""
        with self.inner.open(key, shared=shared) as reader:
            yield _PacedReader(self, reader, key.endswith(".safetensors"))

    def wait(self, nbytes: int) -> None:
        """Wait until the connection has carried this many bytes."""
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + nbytes / self.rate
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class _PacedReader:
    way: _Paced
    inner: Reader
    is_blob: bool

    @property
    def size(self) -> int:
        return self.inner.size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(map(len, buffers))
        self.way.wait(nbytes)
        if self.is_blob:
            with self.way._lock:
                self.way.read += nbytes
        self.inner.read_into(offset, buffers)


def replay(here: Here, *, folder: str, name: str, place: str, saves: int, compress: str, rate: float) -> Measured:
    """Save the first versions, and load the newest and the first of them.

    ``rate``: bytes per second, or 0 for a folder. Times are medians of the saves after the first. Extra: "share":
    stored bytes relative to the same number of full copies; "cpu/GiB" of a save; "held": bytes of host memory; "newest
    cold", "first warm", ...: seconds of a load; "kept": stored bytes, in full copies, after a gc that keeps the last
    8.
    """
    from tests.support.held import held_bytes

    path = Path(place)
    store, saving = open_store(path, rate), list[Clock]()
    try:
        for number, state in enumerate(itertools.islice(_states(trace_of(here, folder, name)), saves)):
            saving.append(Clock())
            with saving[-1]:
                store.save(state, run=_RUN, step=number, compress=compress)  # type: ignore[arg-type]  # a Compress
        copy = values.size_of(state)
        extra = {"cpu/GiB": median(clock.cpu for clock in saving[1:]) * _GIB / copy, "held": float(held_bytes())}
        stored = files.stored(path)
        extra |= _loads(path, rate, saves - 1, state)
        store.gc(keep_last=_KEPT, min_age=0, wait=0)
        extra |= {"share": stored / copy / saves, "kept": files.stored(path) / copy}
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
    wall = median(clock.time for clock in saving[1:])
    return Measured(wall, wall, median(clock.cpu for clock in saving[1:]), stored=stored, extra=extra)


def speed(
    here: Here, *, folder: str, name: str | None, place: str, nbytes: int, saves: int, compress: str, rate: float
) -> Measured:
    """Save versions of ``nbytes`` bytes from a trace, or noise if ``name`` is None.

    Return medians of the saves after the first. ``rate``: bytes per second, or 0 for a folder. Extra: "cpu/GiB" of a
    save; "worst": seconds of the slowest save; seconds of loads.
    """
    path, saving = Path(place), list[Clock]()
    states = _noise(nbytes) if name is None else shifted(trace_of(here, folder, name), nbytes)
    try:
        store = open_store(path, rate)
        for number, state in enumerate(itertools.islice(states, saves)):
            saving.append(Clock())
            with saving[-1]:
                store.save(state, run=_RUN, step=number, compress=compress)  # type: ignore[arg-type]  # a Compress
        extra, stored = _loads(path, rate, saves - 1, state), files.stored(path)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
    wall, cpu = (median(getattr(clock, what) for clock in saving[1:]) for what in ("time", "cpu"))
    extra |= {"cpu/GiB": cpu * _GIB / values.size_of(state), "worst": max(clock.time for clock in saving[1:])}
    return Measured(wall, wall, cpu, stored=stored, extra=extra)


def shifted(trace: Trace, nbytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield shifted copies of the matrices, up to ``nbytes``, in the same memory for each version."""
    import torch

    matrices = [one for one in trace.index.tensors if one.matrix]
    state: torch.Tensor | None = None
    for _, weights in trace.versions():
        flat = np.concatenate([weights[one.start : one.stop] for one in matrices])
        copies = max(1, nbytes // flat.nbytes)
        if state is None:
            state = torch.empty((copies, flat.size), dtype=torch.bfloat16)
        for number in range(copies):
            state[number] = torch.from_numpy(np.roll(flat, number * _SHIFT)).view(torch.bfloat16)
        yield {f"matrices.{number}": state[number] for number in range(copies)}


def _noise(nbytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a model of random bits, in the same memory for each version. Versions are independent."""
    base = values.make("model", nbytes, 1)
    state = values.poisoned(base)
    for number in itertools.count(1):
        for name, tensor in base.items():
            bits = values.as_bytes(tensor)
            values.as_bytes(state[name]).copy_(bits ^ bits.roll(number))
        yield state


def open_store(path: Path, rate: float) -> Store:
    """Open the store as a host without a cache does. ``rate``: bytes per second, or 0 for a folder."""
    from casckpt.repository.repository import Repository
    from casckpt.storage.local.store import LocalStore
    from casckpt.store.store import Store

    storage: Any = LocalStore(path)
    cache = path.parent / f"cache-{next(_NUMBERS)}"
    return Store(Repository(_Paced(storage, rate) if rate else storage, cache, cache_bytes=0))


def _states(trace: Trace) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the matrices of each version, in the same memory for each version."""
    import torch

    for _, weights in trace.versions():
        flat = torch.from_numpy(weights).view(torch.bfloat16)
        yield {one.name: flat[one.start : one.stop] for one in trace.index.tensors if one.matrix}


def _loads(path: Path, rate: float, newest: int, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Measure the seconds of a first load on a new host, and of a second load. Check the newest version."""
    target, seconds = values.poisoned(state), dict[str, float]()
    for what, step in (("first", 0), ("newest", newest)):
        store = open_store(path, rate)
        files.drop_from_cache(path, everything=False)
        for heat in ("cold", "warm"):
            values.poison(target)
            with (clock := Clock()):
                store.load(target, f"{_RUN}@{step}")
            seconds |= {f"{what} {heat}": clock.time, f"{what} {heat} cpu": clock.cpu}
    if any(not values.as_bytes(state[name]).equal(values.as_bytes(target[name])) for name in state):
        raise WrongBytes("casckpt: what was loaded of the newest version is not what was saved")
    return seconds
