from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Damaged
from casckpt.format.blob import DATA_OFFSET
from casckpt.loading import entry_reader, planned_reads, transfer
from casckpt.loading.planned_reads import Reads
from casckpt.plan import reads as planning
from casckpt.tensors.values import Shard
from tests.loading.test_read_bytes import bytes_read, warmed
from tests.support.faulty import FaultyStore
from tests.support.repositories import memory
from tests.support.saves import CELL, blob_keys, cells, counted, flip, small, small_folder

PER = CELL // 4  # the number of float32 elements in a cell


def test_nearby_ranges_of_a_blob_are_read_with_one_request(tmp_path: Path) -> None:
    """In a folder, reading 128 KiB of unneeded bytes costs less than a second request."""
    state = {f"w{i}": cells(1) for i in range(14)}
    store = small_folder(tmp_path / "store")
    saved = store.save(state, step=1, threads=1)
    with counted(store) as around:
        store.read(saved, keys=[])
    with counted(store) as io:
        store.read(saved, keys=["w1", "w3", "w11"])
    # their order in the blob is the key order: w1, w10, w11, w12, w13, w2, w3
    assert io.bytes_read - around.bytes_read == 7 * CELL
    assert io.reads - around.reads == 1


def test_a_load_opens_each_blob_once() -> None:
    faulty = FaultyStore(memory())
    store = small(faulty)
    state = {"w": cells(100), "v": cells(60).view(64, -1).t()}
    store.save(state, step=1)
    store.read("default@1")
    opened = faulty.keys("open")
    assert len(opened) == len(set(opened)) > 8
    assert faulty.count("get", "objects/*.manifest") == 0  # this process saved it


@given(st.integers(1, 6 * PER), st.data())
def test_any_set_of_ranges_of_a_blob_is_read_correctly(numel: int, data: st.DataObject) -> None:
    """There are several shards of one tensor, which may overlap. Every byte in any of them is read once."""
    weight = torch.arange(numel, dtype=torch.int32)
    store = warmed({"w": weight})
    bounds = data.draw(
        st.lists(st.tuples(st.integers(0, numel), st.integers(0, numel)).map(sorted), min_size=1, max_size=4)
    )
    shards = [Shard(torch.full((hi - lo,), -1, dtype=torch.int32), (numel,), flat=(lo, hi)) for lo, hi in bounds]
    read = bytes_read(store, lambda: store.load({"w": shards}, "default@1", verify=False))
    assert read == 4 * len({i for lo, hi in bounds for i in range(lo, hi)})
    verified = bytes_read(store, lambda: store.load({"w": shards}, "default@1"))
    cells_ = {i // PER for lo, hi in bounds for i in range(lo, hi)}
    assert verified == sum(4 * (min(numel, (i + 1) * PER) - i * PER) for i in cells_)
    for (lo, hi), shard in zip(bounds, shards, strict=True):
        assert torch.equal(shard.data, weight[lo:hi])


@pytest.mark.parametrize("together", [1, 3 * CELL, 2 << 20])
@pytest.mark.parametrize("wrong", [0, 4, 9])
def test_a_wrong_cell_among_consecutive_cells_is_named(
    wrong: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_VERIFIED_BYTES", together)
    store = small()
    store.save({"w": cells(9.5)}, step=1)
    (key,) = blob_keys(store)
    first = DATA_OFFSET + wrong * CELL
    flip(store, key, first + 100)
    last = min(first + CELL, DATA_OFFSET + 19 * CELL // 2)
    with pytest.raises(Damaged, match=f"its bytes {first} to {last} are not what was written"):
        store.read("default@1")


@pytest.mark.parametrize("verify", [True, False])
def test_consecutive_cells_have_several_consumers(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_VERIFIED_BYTES", 3 * CELL)
    monkeypatch.setattr(planning, "_LONG_BYTES", 8 * CELL)
    monkeypatch.setattr(planning, "_PIECE_BYTES", 2 * CELL)
    store, saved = small(), cells(12.5)
    store.save({"w": saved}, step=1)
    into = {"w": torch.zeros_like(saved), "v": torch.zeros_like(saved), "u": torch.zeros(2 * len(saved))[::2]}
    store.load(into, "default@1", rename={"v": "w", "u": "w"}, verify=verify)
    assert all(torch.equal(value, saved) for value in into.values())


@pytest.mark.parametrize("verify", [True, False])
def test_a_long_chain_of_overlapping_ranges_is_read_in_several_parts(
    verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_reader, "_BATCH_BYTES", 4 * CELL)
    monkeypatch.setattr(planning, "_LONG_BYTES", 4 * CELL)
    monkeypatch.setattr(planning, "_PIECE_BYTES", CELL)
    sizes = list[int]()

    def plan_lots(*args: Any, **kwargs: Any) -> Reads:
        planned = planned_reads.plan_lots(*args, **kwargs)
        sizes.extend(batch.nbytes for batch in planned.every)
        return planned

    monkeypatch.setattr(entry_reader, "plan_lots", plan_lots)
    store, saved = small(), cells(15)
    store.save({"w": saved}, step=1)
    bounds = [(PER * at, PER * (at + 3)) for at in range(13)]
    shards = [Shard(torch.zeros(hi - lo), (len(saved),), flat=(lo, hi)) for lo, hi in bounds]
    store.load({"w": shards}, "default@1", verify=verify)
    assert all(torch.equal(shard.data, saved[lo:hi]) for shard, (lo, hi) in zip(shards, bounds, strict=True))
    assert max(sizes) <= 4 * CELL
