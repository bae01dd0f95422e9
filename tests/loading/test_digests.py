"""A tensor's digest hashes its bytes in row-major order. It does not depend on ranks or shards."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

import casckpt
from casckpt.base.digest import hex_digest
from casckpt.errors import Damaged, MissingKey
from casckpt.frontends.interchange.safetensors.importing import import_safetensors
from casckpt.loading import regions
from tests.support.saves import blob_keys, counted, flip, small, small_folder
from tests.support.tensors import NAMES, bytes_of, raw
from tests.support.together import line, numbers, spread

if TYPE_CHECKING:
    from tests.support.ranks import Pool

SHAPES = {"big": (700, 512), "odd": (67, 33, 5), "tiny": (3,), "none": (0, 4), "one": ()}


def tensors() -> dict[str, torch.Tensor]:
    return {key: numbers(key, *shape) for key, shape in SHAPES.items()}


def expected(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {key: hex_digest(bytes_of(one)) for key, one in state.items()}


@pytest.fixture(autouse=True)
def in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use lots of a few cells."""
    monkeypatch.setattr(regions, "WINDOW_BYTES", 5 * 4096)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "complex128", "uint8", "float8_e5m2", "bool"])
def test_a_digest_is_the_hash_of_the_bytes(dtype: str) -> None:
    store, state = small(), {"a": raw(dtype, (37, 300), 1).clone(), "b": raw(dtype, (5,), 2).clone()}
    store.save(state | {"t": state["a"].t()}, step=1)
    found = store.digests("default@1")
    assert found == expected(state | {"t": state["a"].t().contiguous()})
    assert store.digests("default@1", keys=["b*"]) == {"b": found["b"]}
    with pytest.raises(MissingKey, match="nothing in default@1 matches 'c'"):
        store.digests("default@1", keys=["c"])


def save_spread(rank: int, size: int, path: Path, run: str, placement: Placement) -> None:
    ways: dict[bool, list[Placement]] = {True: [placement], False: [Replicate()]}
    held = {key: one for name, full in tensors().items()
            for key, one in spread({name: full}, line(size), ways[full.dim() > 1]).items()}  # fmt: skip
    casckpt.open(path).save(held, run=run, step=1)


def test_a_digest_is_identical_in_all_topologies(ranks: Pool, tmp_path: Path) -> None:
    store, state = small_folder(tmp_path / "store"), tensors()
    store.save(state, run="whole", step=1)
    for size, placement in ((2, Shard(0)), (4, Shard(0)), (4, Shard(1))):
        ranks.run(size, save_spread, tmp_path / "store", f"r{size}{placement.dim}", placement)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    import_safetensors(store, tmp_path / "model.safetensors", run="file", step=1)
    found = {one.run: store.digests(one) for one in store.checkpoints()}
    assert sorted(found) == ["file", "r20", "r40", "r41", "whole"]
    assert all(one == expected(state) for one in found.values())


def test_a_digest_matches_the_bytes_in_a_safetensors_file(tmp_path: Path) -> None:
    dtypes = ("bfloat16", "float64", "complex64", "uint32", "bool", "float8_e4m3fn", "float8_e8m0fnu")
    state = {dtype: raw(dtype, (37, 300), 1).clone() for dtype in dtypes if dtype in NAMES}
    state |= tensors() | {"t": numbers("t", 90, 70).t()}
    store = small_folder(tmp_path / "store")
    store.save(state, step=1, compress="always")
    casckpt.export(store, "default@1", tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    ends = {key: one["data_offsets"] for key, one in header.items()}
    assert store.digests("default@1") == {key: hex_digest(body[lo:hi]) for key, (lo, hi) in ends.items()}


def test_equal_cells_in_a_different_order_produce_a_different_digest() -> None:
    store, full = small(), numbers("full", 64, 64)
    left, right = full[:, :32].contiguous(), full[:, 32:].contiguous()
    other = torch.cat([left.view(32, 64), right.view(32, 64)])
    columns = [casckpt.Shard(left, (64, 64), (0, 0)), casckpt.Shard(right, (64, 64), (0, 32))]
    rows = [casckpt.Shard(other[:32], (64, 64), (0, 0)), casckpt.Shard(other[32:], (64, 64), (32, 0))]
    store.save({"columns": columns, "rows": rows}, step=1)
    for key, one in (("columns", full), ("rows", other)):
        assert store.digests("default@1", keys=[key]) == expected({key: one})


def test_a_computed_digest_also_applies_to_checkpoints_with_the_same_cells() -> None:
    store, state = small(), {"a": numbers("a", 9000), "b": numbers("b", 9000)}
    store.save(state, step=1)
    store.digests("default@1")
    state["b"] = state["b"] + 1
    store.save(state, step=2)
    with counted(store) as counts:
        assert store.digests("default@2") == expected(state)
    assert counts.bytes_read < 1.2 * state["b"].nbytes
    with counted(store) as counts:
        assert store.digests("default@2", keys=["b"]) == expected({"b": state["b"]})
    assert counts.bytes_read < 1000  # the size of the records


def test_the_digest_of_damaged_bytes_is_not_computed(tmp_path: Path) -> None:
    store = small_folder(tmp_path)
    store.save({"a": numbers("a", 9000)}, step=1)
    for key in blob_keys(store):
        flip(store, key, 9000)
    with pytest.raises(Damaged, match="'a'"):
        store.digests("default@1")


def test_a_thinned_tensor_keeps_its_known_digest() -> None:
    store, state = small(), {"model.w": numbers("w", 9000), "optim.m": numbers("m", 9000), "optim.s": torch.ones(1)}
    saved = store.save(state, step=1)
    store.thin("default@1", drop="optim.*")
    assert store.digests(saved.id).keys() == {
        "model.w",
        "optim.s",
    }  # the digest of a tensor with one cell is the cell's digest
    store.restore(saved.id, whole=True)
    assert store.digests(saved.id) == expected(state)
    store.thin("default@1", drop="optim.*")
    assert store.digests(saved.id) == expected(state)
