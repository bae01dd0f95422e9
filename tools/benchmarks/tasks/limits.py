"""The limits of this machine, measured in the same run: raw writes and reads, hashing, and copies."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import blake3
import numpy as np

from benchmarks import files, values
from benchmarks.environments import program
from benchmarks.measure import Measured, Meter

if TYPE_CHECKING:
    import torch

    from benchmarks.worker import Here

T = TypeVar("T")
_BLOB = 32 << 20
_BLOCK = 4096
_PIECE = 8 << 20
_CELL = 1 << 20
_RAW = "raw"


def write(here: Here, folder: str, size: int, writers: int) -> Measured:
    """Write ``size`` bytes durably and directly, in preallocated files of 32 MiB.

    The files and the folder are synced.
    """
    path = Path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffers = [_aligned(here, number, _BLOB) for number in range(writers)]
    meter = Meter()
    path.mkdir()
    todo = list(enumerate(length for _, length in files.pieces(size, _BLOB)))
    _shared(todo, writers, lambda worker, one: _write_file(path / f"{one[0]:05}", buffers[worker], one[1]))
    for one in (path, path.parent):
        files.sync(one)
    return meter.stop()


def _write_file(path: Path, buffer: memoryview, size: int) -> None:
    padded = -(-size // _BLOCK) * _BLOCK
    fd = _open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.posix_fallocate(fd, 0, padded)
        os.pwrite(fd, buffer[:padded], 0)
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_and_write(here: Here, folder: str, cache: str, size: int) -> Measured:
    """Read all files of a folder, hash them cell by cell, and then write ``size`` bytes durably."""
    place = Path(folder + ".written")
    read = read_and_hash(here, folder, cache)
    try:
        written = write(here, str(place), size, here.threads)
    finally:
        shutil.rmtree(place)
    return Measured(read.durable + written.durable, read.durable + written.durable, read.cpu + written.cpu)


def read_and_hash(here: Here, folder: str, cache: str) -> Measured:
    """Read all files of a folder on all cores, and hash them cell by cell."""
    path = Path(folder)
    buffers = [_aligned(here, number, _CELL) for number in range(here.threads)]
    todo = [(file, at, n) for file in files.files_of(path) for at, n in files.pieces(file.stat().st_size, _CELL)]
    prepare(here, path, cache)
    meter = Meter()
    _shared(todo, here.threads, lambda worker, one: _read_and_hash(buffers[worker], *one))
    return meter.stop()


def _read_and_hash(buffer: memoryview, path: Path, offset: int, length: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        _fill_and_hash(fd, buffer[:length], offset)
    finally:
        os.close(fd)


def put_state(here: Here, folder: str, state: str) -> None:
    """Write a state's tensors one after the other into a file, for `read`."""
    path = Path(folder)
    path.mkdir(parents=True)
    with (path / _RAW).open("wb", buffering=0) as file:
        for tensor in here.on_host(state).values():
            for start, length in files.pieces(tensor.nbytes):
                file.write(values.as_bytes(tensor).numpy()[start : start + length].data)
        os.fsync(file.fileno())


def read(
    here: Here, *, folder: str, state: str, threads: int, cache: str, eighth: int | None = None, hashed: bool = False
) -> Measured:
    """Read with several threads into touched tensors, or into an eighth of every tensor.

    ``hashed``: read cell by cell, and hash each cell after it is read.
    """
    path = Path(folder)
    tensors = here.on_host(state)
    if "raw" not in here.kept:
        here.kept["raw"] = values.poisoned(tensors)
    prepare(here, path, cache)
    todo = list(_ranges(tensors, here.kept["raw"], eighth, _CELL if hashed else _PIECE))
    act = _fill_and_hash if hashed else _fill
    fd = os.open(path / _RAW, os.O_RDONLY)
    try:
        meter = Meter()
        _shared(todo, threads, lambda _, one: act(fd, *one))
        return meter.stop()
    finally:
        os.close(fd)


def _ranges(
    tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor], eighth: int | None, piece: int
) -> Iterator[tuple[memoryview, int]]:
    """Return (memory, range of the file) for all reads."""
    offset = 0
    for name, tensor in tensors.items():
        lo, hi = 0, tensor.nbytes
        if eighth is not None:
            rows = tensor.chunk(8)[0].nbytes
            lo, hi = min(eighth * rows, hi), min((eighth + 1) * rows, hi)
        memory = values.as_bytes(into[name]).numpy().data
        for start, length in files.pieces(hi - lo, piece):
            yield memory[lo + start : lo + start + length], offset + lo + start
        offset += tensor.nbytes


def _fill(fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < memory.nbytes:
        done += os.preadv(fd, [memory[done:]], offset + done)


def _fill_and_hash(fd: int, memory: memoryview, offset: int) -> None:
    _fill(fd, memory, offset)
    blake3.blake3(memory).digest()


def fio(here: Here, *, folder: str, size: int, work: str, jobs: int, depth: int, block: int) -> Measured:
    """Read or write ``size`` bytes directly, in preallocated files, one for each of fio's ``jobs``.

    ``depth``: the number of blocks of ``block`` bytes in flight, for each job. fio's memory is in huge pages, since a
    device takes only some hundred segments per request. The time is fio's own. It includes the
    sync of what is written, and not the start of fio or the creation of files. It leaves out
    a last partial block, which the time accounts for.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    each = -(-size // (jobs * _BLOCK)) * _BLOCK
    options = {
        "name": "disk", "directory": path, "ioengine": "libaio", "direct": 1, "thread": 1, "fallocate": "posix",
        "rw": work, "numjobs": jobs, "iodepth": depth, "bs": min(block, each), "size": each, "end_fsync": 1,
        "group_reporting": 1, "output-format": "json",
    }  # fmt: skip
    command = [program("fio", create=False), *(f"--{name}={value}" for name, value in options.items())]
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    if work == "read":
        subprocess.run([*command, "--create_only=1"], capture_output=True, check=True)
        prepare(here, path, "cold")
    meter = Meter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    measured = meter.stop()
    found = json.loads(done.stdout)["jobs"][0][work]
    measured.blocked = measured.durable = found["runtime"] / 1000 * size / found["io_bytes"]
    measured.peak = None
    return measured


def hashes(here: Here, state: str) -> Measured:
    """Compute the digests of all 1 MiB cells of a state in place, on all cores."""
    cells = _cells(here, state)
    meter = Meter()
    _shared(cells, here.threads, lambda _, cell: blake3.blake3(cell).digest())
    return meter.stop()


def copy_and_hash(here: Here, state: str) -> Measured:
    """Copy all 1 MiB cells of a state into one buffer per core, and hash them there."""
    cells = _cells(here, state)
    buffers = [np.asarray(_aligned(here, number, _CELL)) for number in range(here.threads)]

    def act(core: int, cell: memoryview) -> None:
        buffer = buffers[core][: cell.nbytes]
        np.copyto(buffer, np.asarray(cell))
        blake3.blake3(buffer.data).digest()

    meter = Meter()
    _shared(cells, here.threads, act)
    return meter.stop()


def _cells(here: Here, state: str) -> list[memoryview]:
    return [
        raw[start : start + length].data
        for tensor in here.on_host(state).values()
        for raw in [values.as_bytes(tensor).numpy()]
        for start, length in files.pieces(raw.size, _CELL)
    ]


def copy(here: Here, state: str, threads: int) -> Measured:
    """Copy a state once into touched memory, with several threads."""
    source = here.on_host(state)
    if "copy" not in here.kept:
        here.kept["copy"] = values.poisoned(source)
    target: dict[str, torch.Tensor] = here.kept["copy"]
    pairs = []
    for name, tensor in source.items():
        one, other = values.as_bytes(tensor).numpy(), values.as_bytes(target[name]).numpy()
        pairs += [(one[a : a + n], other[a : a + n]) for a, n in files.pieces(one.size)]
    meter = Meter()
    _shared(pairs, threads, lambda _, pair: np.copyto(pair[1], pair[0]))
    return meter.stop()


def across(here: Here, state: str, to_gpu: bool) -> Measured:
    """Copy a state once between the GPU and pinned host memory, tensor by tensor. Queue all copies at once."""
    source = here.states[state]
    if "pinned" not in here.kept:
        here.kept["pinned"] = {name: one.cpu().pin_memory() for name, one in here.on_host(state).items()}
        here.kept["on the GPU"] = {name: one.clone() for name, one in source.items()}
    pinned: dict[str, torch.Tensor] = here.kept["pinned"]
    here.settle()
    meter = Meter()
    for name, one in source.items():
        if to_gpu:
            here.kept["on the GPU"][name].copy_(pinned[name], non_blocking=True)
        else:
            pinned[name].copy_(one, non_blocking=True)
    here.settle()
    return meter.stop()


def _shared(todo: Sequence[T], workers: int, act: Callable[[int, T], object]) -> None:
    """Process a list with several threads."""
    left = iter(todo)

    def work(worker: int) -> None:
        for one in left:  # threads may share a list's iterator
            act(worker, one)

    if workers == 1:
        work(0)
        return
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))


def _aligned(here: Here, number: int, size: int) -> memoryview:
    """Return a page-aligned buffer of random bytes, which is kept for reuse."""
    key = f"buffer {number} {size}"
    if key not in here.kept:
        mapped = mmap.mmap(-1, size)
        mapped[:] = np.random.default_rng(number).bytes(size)
        here.kept[key] = memoryview(mapped)
    found: memoryview = here.kept[key]
    return found


def _open(path: Path, flags: int) -> int:
    """Open a file for direct I/O if the file system supports it."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        return os.open(path, flags, 0o644)


def prepare(here: Here, path: Path, cache: str) -> None:
    """Bring a folder into the page cache ("warm"), or drop it from there ("cold")."""
    if cache == "warm":
        files.bring_into_cache(path)
    else:
        files.drop_from_cache(path, everything=not here.quick)
