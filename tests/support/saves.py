"""Stores with small cells and blobs, exact comparisons of states, and direct reads of stored objects."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch

from casckpt.base.digest import hex_digest
from casckpt.base.progress import Progress
from casckpt.contents import manifests
from casckpt.format.blob import decode_header
from casckpt.format.keys import parse_object
from casckpt.loading.regions import EntrySlice, RegionReader
from casckpt.repository.repository import Repository
from casckpt.saving import encoder as kept
from casckpt.storage.base import ObjectStore
from casckpt.storage.forking import PerProcess
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support import exact
from tests.support.counting import IoCounts, count_io
from tests.support.repositories import memory
from tests.support.tensors import same

T = TypeVar("T")
_RUNS = itertools.count()

CELL, BLOB = 4096, 64 << 10  # bytes
_NUMBERS = itertools.count()


def small(storage: ObjectStore | None = None, *, cell_bytes: int = CELL, blob_bytes: int = BLOB) -> Store:
    """Return a store in memory (or in ``storage``) with small cells and blobs."""
    store = Store(Repository(memory(near=False) if storage is None else storage))
    store.create(cell_bytes=cell_bytes, blob_bytes=blob_bytes)
    return store


def small_folder(path: Path) -> Store:
    """Return a store in a folder, with small cells and blobs."""
    store = open_store(path)
    store.create(cell_bytes=CELL, blob_bytes=BLOB)
    return store


def cells(count: float, seed: int | None = None) -> torch.Tensor:
    """Return float32 values that fill ``count`` cells. Without a seed, each call yields different numbers."""
    generator = torch.Generator().manual_seed(next(_NUMBERS) + 10_000 if seed is None else seed)
    return torch.randn(int(count * CELL // 4), generator=generator)


def trained(count: float, step: int, seed: int = 0) -> torch.Tensor:
    """Return bfloat16 values that fill ``count`` cells. As in training, each step changes some elements."""
    bits = cells(2 * count, seed).bfloat16().view(torch.int16)
    for number in range(step):
        bits[number % 97 :: 97] += 1
    return bits.view(torch.bfloat16)


def same_state(one: Any, other: Any) -> bool:
    """Report whether two nested states agree in types, order, dtypes and every bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and same(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        extras = vars(one) == vars(other) if isinstance(one, OrderedDict) else True
        pairs = zip(one.items(), other.items(), strict=False)
        return (
            extras and len(one) == len(other) and all(exact.same(a, b) and same_state(v, w) for (a, v), (b, w) in pairs)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(itertools.starmap(same_state, zip(one, other, strict=True)))
    return exact.same(one, other)


@contextmanager
def counted(store: Store) -> Iterator[IoCounts]:
    """Count the storage calls inside the block. The result is complete at the end of the block."""
    storage: Any = store.repository.storage
    counts = count_io(getattr(storage, "inner", storage))
    before = {field.name: getattr(counts, field.name) for field in fields(IoCounts)}
    delta = IoCounts()
    yield delta
    for name, value in before.items():
        setattr(delta, name, getattr(counts, name) - value)


def blob_keys(store: Store) -> list[str]:
    return [entry.key for entry in store.repository.storage.list("objects/") if _kind(entry.key) == "safetensors"]


def data_of(store: Store, key: str) -> int:
    """Return the number of data bytes in a blob, without header and proof."""
    blob = content(store, key)
    return sum(nbytes for _, nbytes in decode_header(blob, len(blob)))


def manifest_keys(store: Store) -> list[str]:
    return [entry.key for entry in store.repository.storage.list("objects/") if _kind(entry.key) == "manifest"]


def _kind(key: str) -> str | None:
    name = parse_object(key)
    return name.kind if name else None


def content(store: Store, key: str) -> bytes:
    return store.repository.storage.get(key, limit=1 << 30)


def overwrite(store: Store, key: str, data: bytes) -> None:
    """Replace the bytes of an object."""
    store.repository.storage.replace(key, data)


def flip(store: Store, key: str, position: int) -> None:
    """Change one bit of an object."""
    data = bytearray(content(store, key))
    data[position] ^= 1
    overwrite(store, key, bytes(data))


def hashes(store: Store, ref: str, pattern: str = "*") -> dict[str, str]:
    """Return the hash of the stored bytes of each tensor whose key matches ``pattern``, in row-major order, by key."""
    manifest = manifests.get(store.repository, store.get(ref).commit)
    reader = RegionReader(store.repository, manifest, 0, Progress())
    return {
        key: hex_digest(b"".join(map(bytes, reader.read_joined([EntrySlice(entry, 0, entry.numel)]))))
        for key, entry in manifest.tensors.items()
        if fnmatch(key, pattern)
    }


def steps(store: Store) -> list[tuple[str, int]]:
    """Return the run and step of all visible checkpoints."""
    return [(ckpt.run, ckpt.step) for ckpt in store.checkpoints()]


def files(path: Path) -> dict[Path, bytes]:
    """Return the contents of all files below a folder."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@contextmanager
def another_process() -> Iterator[None]:
    """Inside the block, this process does not remember which runs it has saved."""
    mine, kept._RUNS = kept._RUNS, PerProcess(kept._Runs)
    try:
        yield
    finally:
        kept._RUNS = mine


def reopened(store: Store) -> Store:
    """Return the same store as a new process would see it."""
    return Store(Repository(store.repository.storage))


def new_run() -> str:
    """Return a new run, because casckpt logs each message once per run."""
    return f"run{next(_RUNS)}"


def copied(one: T) -> list[T]:
    """Return two copies: a pickled one, and a deep one."""
    return [pickle.loads(pickle.dumps(one)), copy.deepcopy(one)]
