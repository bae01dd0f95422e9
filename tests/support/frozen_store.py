"""The store in tests/data/frozen_store, which each version reads, extends, and prunes.

``python -m tests.support.frozen_store FOLDER`` created it. After the first release, do not regenerate it, because it
would no longer test anything. Add a new store when a later version writes something new. ``python -m
tests.support.frozen_store FOLDER coded`` created tests/data/frozen_store_coded, whose cells are stored as frames.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import casckpt

_BEGIN = 1_767_225_600_000_000  # 2026-01-01, in microseconds: for all readers, the expiring tag has expired
MIRROR = "memory://frozen-mirror"
CELL, BLOB = 4096, 65536
NAMES = "abcdefgh"
ATTACHMENTS = {"config.json": b'{"layers": 2}\n', "big.bin": bytes(range(256)) * 64}
METADATA = {"note": "as it was", "nested": [1, 2.5, None, {"a": True}]}
METRICS = {"loss": 0.25, "bad": float("nan"), "far": float("inf")}
_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Return bytes that do not depend on a random number generator."""
    numbers = torch.arange(nbytes, dtype=torch.int64) * (2 * seed + 3) + seed
    return ((numbers ^ (numbers >> 7)) % 251).to(torch.uint8)


def of_dtype(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of ``shape`` with arbitrary bits (0 and 1 for bool)."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = pattern(size * int(np.prod(shape, dtype=np.int64)), seed)
    return (raw % 2).bool().reshape(shape) if dtype is torch.bool else raw.view(dtype).reshape(shape)


def kinds() -> dict[str, Any]:
    """Return a state with nearly every kind of leaf."""
    tensors = {str(dtype).removeprefix("torch."): of_dtype(dtype, (3, 700), n) for n, dtype in enumerate(_DTYPES)}
    tied = of_dtype(torch.float32, (40,), 50)
    return {
        "tensors": tensors,
        "shapes": {
            "none": torch.empty(0, 4),
            "scalar": of_dtype(torch.float64, (), 51),
            "strided": of_dtype(torch.int32, (30, 20), 52).t(),
            "long": of_dtype(torch.bfloat16, (5, 9000), 53),
        },
        "tied": {"one": tied, "other": tied},
        "plain": {
            "numbers": [0, -1, 2**70, 0.1, float("inf"), 1 + 2j, True, None],
            "texts": ("", "é\n", b"\x00\xff"),
            "by number": {1: "one", (2, "b"): "two"},
            "arrays": [np.arange(6, dtype=">i2").reshape(2, 3), np.float32(1.5), np.array("2024-02-29", "M8[D]")],
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
        },
    }


def train(step: int) -> dict[str, Any]:
    """Return eight tensors. Step 2 changes more than half of them, so the blob of step 1 becomes worn.

    Later steps change one.
    """
    new = {name: 2 if place < 5 else 1 for place, name in enumerate(NAMES)} if step > 1 else dict.fromkeys(NAMES, 1)
    new |= {NAMES[later - 3]: later for later in range(3, step + 1)}
    return {
        "step": step,
        "model": {name: of_dtype(torch.float32, (1024,), 10 * new[name] + place) for place, name in enumerate(NAMES)},
    }


def moved(step: int) -> dict[str, Any]:
    """Return a tensor that never changes and one that does."""
    return {"stays": of_dtype(torch.int16, (4096,), 60), "goes": of_dtype(torch.int16, (4096,), 60 + step)}


def hurt() -> dict[str, Any]:
    """Return two tensors, each of them a leaf."""
    return {"whole": of_dtype(torch.uint8, (70_000,), 70), "hit": of_dtype(torch.int64, (9_000,), 71)}


def coded(step: int) -> dict[str, Any]:
    """Return floats that change slightly, considerably or completely at each step, and values that are never
    encoded."""
    few = pattern(20_000, 80).view(torch.int16) % 512 + 0x3F00
    for later in range(2, step + 1):
        few[later :: 60 * later] += later - 3
    little = pattern(12_288, 81).view(torch.int32) % 2**20 + 0x3F000000
    wholly = pattern(8192, 82 + step).view(torch.int16) % 1024 * 64 + 0x1C00  # both signs
    drift = pattern(3072, 82).int() % 16 * (step - 1)
    return {
        "few": few.view(torch.bfloat16).reshape(100, 100),
        "little": (little + drift).view(torch.float32),
        "wholly": wholly.view(torch.float16),
        "double": (pattern(8192, 90).view(torch.int64) % 2**40 + step + 0x3FF0 * 2**48).view(torch.float64),
        "complex": torch.complex((little + drift).view(torch.float32)[:1024], torch.full((1024,), 1.0 * step)),
        "never": [of_dtype(torch.int32, (1024,), 91), torch.full((3,), step)],
    }


def value_of(run: str, step: int) -> dict[str, Any]:
    """Return the value that was saved under this run and step."""
    made = {"train": train, "moved": moved, "coded": coded}
    return made[run](step) if run in made else {"kinds": kinds, "hurt": hurt}[run]()


def told(store: casckpt.Store) -> list[dict[str, Any]]:
    """Return the listing of all checkpoints in the form of expected.json."""
    return [
        {"id": one.id, "run": one.run, "step": one.step, "visible": not (one.forgotten or one.replaced)}
        for one in store.checkpoints(forgotten=True)
    ]


def make(folder: Path) -> None:
    """Write the store."""
    with tempfile.TemporaryDirectory() as cache, mock.patch("socket.gethostname", return_value="host"):
        store = casckpt.open(folder, mirror=MIRROR, cache_dir=cache)
        store.repository.user = "ann"
        store.repository.clock = itertools.count(_BEGIN, 1000).__next__
        store._its_mirror().target.clock = store.repository.clock
        store.create(cell_bytes=CELL, blob_bytes=BLOB)
        store.save(
            kinds(), run="kinds", step=1, attachments=ATTACHMENTS, metadata=METADATA, metrics=METRICS, healthy=True
        )
        for step in range(1, 7):
            store.save(train(step), run="train", step=step, metrics={"loss": 1 / step}, healthy=step != 5)
        for step in (1, 2):
            store.save(moved(step), run="moved", step=step)
        store.save(hurt(), run="hurt", step=1)
        store.wait_for_mirror()
        store.tag("best", "train@2")
        store.tag("ends", "train@1", expires="1s")
        _move(store)
        _flip(folder, hurt()["hit"])
        assert store.verify("hurt@1").is_damaged
        store.forget("train@3")
        store.wait_for_mirror()
    found = told(casckpt.open(folder))
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def make_coded(folder: Path) -> None:
    """Write a store of encoded cells. The first checkpoint is purged, but the bases of other cells remain."""
    with tempfile.TemporaryDirectory() as cache, mock.patch("socket.gethostname", return_value="host"):
        store = casckpt.open(folder, cache_dir=cache)
        store.repository.user = "ann"
        store.repository.clock = itertools.count(_BEGIN, 1000).__next__
        store.create(cell_bytes=CELL, blob_bytes=BLOB)
        for step in range(1, 6):
            store.save(coded(step), run="coded", step=step, compress="always")
        store.gc(keep_last=4, min_age=0)
    found = told(casckpt.open(folder))
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def _move(store: casckpt.Store) -> None:
    """Rewrite moved@2 without the blob of moved@1, which also holds cells that only the purged step needs."""
    store.forget("moved@1")
    store.gc(min_age=0, run="moved")
    assert len(store.copy_to(store, "moved@2", blob_bytes=BLOB).copied) == 1


def _flip(folder: Path, tensor: torch.Tensor) -> None:
    """Flip a byte in the middle of a tensor in its blob."""
    wanted = bytes(tensor.view(torch.uint8).numpy())[CELL : CELL + 512]
    for path in folder.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        at = data.find(wanted)
        if at >= 0:
            data[at + 100] ^= 1
            path.chmod(0o644)
            path.write_bytes(data)
            return
    raise AssertionError("no blob holds these bytes")


if __name__ == "__main__":
    (make_coded if sys.argv[2:] == ["coded"] else make)(Path(sys.argv[1]))
