"""The ranks of a host read each byte of a remote store once, whatever each of them needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

import casckpt
from casckpt.repository import repository as module
from tests.support.bucket_reads import ReadRange, bucket, nbytes, union
from tests.support.cut import cut
from tests.support.saves import cells, small

if TYPE_CHECKING:
    from tests.support.ranks import Pool

LAYOUTS: dict[str, list[Placement]] = {"replicas": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)]}
TALL = 6 * 64 * 1024  # elements of each tensor


def state(layout: str, size: int) -> dict[str, Any]:
    """Return a state of several blobs, as one of ``size`` ranks holds it."""
    full = {f"w{n}": cells(24, seed=n).reshape(-1, 256) for n in range(6)}
    if layout == "mixed":
        mesh = init_device_mesh("cpu", (size,))
        kinds = list(LAYOUTS.values())
        return {key: cut(one, mesh, kinds[n % 3]) for n, (key, one) in enumerate(full.items())}
    return {key: cut(one, init_device_mesh("cpu", (size,)), LAYOUTS[layout]) for key, one in full.items()}


def local(value: Any) -> torch.Tensor:
    return value.to_local()


def load(rank: int, size: int, folder: Path, memory: Path, layout: str, share: Any) -> list[ReadRange]:
    module.MEMORY = memory
    store, storage = bucket(folder, share)
    expected = state(layout, size)
    filled = {key: torch.zeros_like(value) for key, value in expected.items()}
    store.load(filled, "latest")
    assert all(torch.equal(local(filled[key]), local(expected[key])) for key in expected)
    return [one for one in storage.ranges if one.key.endswith(".safetensors")]


def save(rank: int, size: int, folder: Path, layout: str) -> None:
    small(bucket(folder)[1]).save(state(layout, size), step=1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_of_a_host_read_each_byte_once(ranks: Pool, tmp_path: Path, size: int) -> None:
    (tmp_path / "memory").mkdir()
    for before in ("mixed", "rows"):
        folder = tmp_path / before
        ranks.run(4, save, folder, before)
        for layout in ("replicas", "rows", "columns", "mixed"):
            each = ranks.run(size, load, folder, tmp_path / "memory", layout, False)
            alone = [one for found in each for one in found]
            together = [one for found in ranks.run(size, load, folder, tmp_path / "memory", layout, "auto") for one in found]
            print(size, before, layout, nbytes(alone) / union(alone), nbytes(together) / union(alone), union(together)/union(alone))
            print([str(p) for p in (tmp_path/"memory").rglob("*")])
