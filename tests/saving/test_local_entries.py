"""Small tensors in columns are stored like cells, one by one."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.contents import manifests
from casckpt.format.keys import blob_key
from casckpt.format.sections.blobs import BlobRef
from casckpt.plan.reuse import ReusableCells
from casckpt.saving import rank_part
from casckpt.saving.local_entries import Cell, SmallCells, plan_work
from casckpt.saving.prepare import prepare
from casckpt.store.store import Store
from casckpt.tensors.memory import ADDRESSES, tensor_bytes
from casckpt.tensors.values import Shard
from tests.support.saves import CELL, cells, same_state, small_folder

NOTHING = ReusableCells(None, [], lambda ref: False)


def state() -> dict[str, Any]:
    """Return a state with small tensors of several kinds, and with branches whose keys are not adjacent when sorted."""
    small = {f"w{n}": cells(1 / (1 + n % 5), seed=n) for n in range(240)}
    odd = {"strided": cells(1 / 2, seed=1).reshape(8, -1).t(), "empty": torch.empty(0, 2), "scalar": torch.tensor(3)}
    types = {f"t{n}": cells(1 / 8, seed=n).to(dtype) for n, dtype in enumerate((torch.bool, torch.int8, torch.half))}
    return {
        "a": {**small, **odd, "same": small["w3"].clone(), "tied": small["w4"], "zero": torch.zeros(40)},
        "a-b": {**types, "large": cells(3.5, seed=9), "negated": torch._neg_view(cells(1 / 4, seed=8))},
        "a.c": {
            "w": torch.nn.Parameter(cells(1 / 3, seed=7)),
            "complex": cells(1 / 4, seed=6).to(torch.complex64).conj(),
        },
        "zeros": torch.zeros(40),
    }


def change(saved: dict[str, Any], every: int) -> None:
    for key, tensor in list(saved["a"].items())[::every]:
        if key.startswith("w"):
            tensor[0] += 1
    saved["a"]["w7"].copy_(saved["a"]["w2"])  # equal bytes in different tensors


def refs(store: Store, step: int) -> list[BlobRef]:
    return list(manifests.get(store.repository, store.get(f"default@{step}").commit).blobs)


def stored(store: Store) -> list[Any]:
    """Return what the checkpoints of a store consist of, except for the names of transactions."""
    found: list[Any] = []
    for step in range(4):
        manifest = manifests.get(store.repository, store.get(f"default@{step}").commit)
        committed = store.get(f"default@{step}").commit.committed
        rows, tables = manifest.raw_rows(), [bytes(manifest.raw_cells(entry)) for entry in manifest.entries]
        blobs = [(ref.hash, ref.size, ref.worn) for ref in refs(store, step)]
        sizes = (committed.bytes_total, committed.bytes_written, committed.bytes_reused, committed.tensors)
        found.append((blobs, [bytes(row) for row in rows], tables, sizes, committed.health))
    return found


@pytest.mark.parametrize("options", [{}, {"health": True}, {"compress": "always"}, {"frozen": ["a.w1*"]}], ids=str)
def test_small_tensors_are_stored_like_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    found = []
    for folder in ("columns", "cells"):
        if folder == "cells":
            monkeypatch.setattr(rank_part, "LEAF_BYTES", 0)
            monkeypatch.setattr(rank_part, "MIN_CELL", 0)
        store, saved = small_folder(tmp_path / folder), state()
        for step, every in enumerate((1, 1000, 7, 1)):
            if step:
                change(saved, every)
            store.save(saved, step=step, threads=1, **options)
            assert same_state(store.read("latest"), saved)
        found.append(stored(store))
    assert found[0] == found[1]
    assert len(found[0][0][0]) > 4, "lots are split at the ends of blobs"


def test_an_unchanged_save_describes_the_same_cells(tmp_path: Path) -> None:
    store, saved = small_folder(tmp_path / "store"), state()
    store.save(saved, step=0)
    first = store.save(saved, step=1)
    again = Store(store.repository).save(saved, step=2)  # reads the manifest, because it has no last share
    tables = [manifests.get(store.repository, one.commit).raw_rows() for one in (store.get("default@0"), first, again)]
    assert tables[0] == tables[1] == tables[2]
    assert first.commit.committed.bytes_written == again.commit.committed.bytes_written == 0


def test_planned_cells_keep_the_memory_of_their_tensors_alive() -> None:
    values = {f"w{n}": torch.full((256,), float(n)) for n in range(20)}
    prepared = prepare(values, None, rank=0, allow_pickle=False)
    work = plan_work(prepared.sources, CELL, NOTHING, prepared.streams, CELL)
    (small,) = (cell for cells in work for cell in cells)
    assert isinstance(small, SmallCells)
    for value in values.values():
        value.data = torch.zeros(1)  # as another thread may do
    gc.collect()
    others = [torch.full((256,), -1.0) for _ in range(100)]
    held = {block.address for block in small.blocks if block is not None}
    assert held == set(small.address.tolist())
    found = [np.frombuffer(ADDRESSES[address : address + 4], np.float32)[0] for address in small.address.tolist()]
    assert sorted(found) == [float(n) for n in range(20)]
    assert len(others) == 100


def test_only_plain_tensors_that_are_written_completely_are_in_columns() -> None:
    class Subclass(torch.Tensor):
        pass

    values = {
        "plain": cells(1 / 4),
        "parameter": torch.nn.Parameter(cells(1 / 4)),
        "subclass": cells(1 / 4).as_subclass(Subclass),
        "frozen": cells(1 / 4),
        "long": cells(1),
        "strided": cells(1 / 4)[::2],
        "empty": torch.empty(0),
    }
    prepared = prepare(values, None, rank=0, allow_pickle=False, frozen=["frozen"])
    work = plan_work(prepared.sources, CELL, NOTHING, prepared.streams, CELL)
    items = [cell for cells in work for cell in cells]
    small = [prepared.sources[number].key for item in items if isinstance(item, SmallCells) for number in item.source]
    assert sorted(small) == ["parameter", "plain"]
    others = {prepared.sources[item.source].key for item in items if isinstance(item, Cell)}
    assert others == {"subclass", "frozen", "long", "strided"}
    assert not any(
        isinstance(cell, SmallCells) for cells in plan_work(prepared.sources, CELL, NOTHING) for cell in cells
    )
    assert all(tensor_bytes(values[key]) is not None for key in small)


def test_locations_set_in_a_run_are_visible_in_all_rows() -> None:
    values = {f"w{n}": cells(1 / 4) for n in range(6)}
    prepared = prepare(values, None, rank=0, allow_pickle=False)
    ((small,),) = plan_work(prepared.sources, CELL, NOTHING, prepared.streams, CELL)
    assert isinstance(small, SmallCells)
    runs = list(small.runs(np.array([0, 0, 1, 1, 1, 0])))
    assert [(label, len(run.source)) for label, run in runs] == [(0, 2), (1, 3), (0, 1)]
    runs[1][1].placed.blob[:] = 7
    assert small.placed.blob.tolist() == [0, 0, 7, 7, 7, 0]


def test_small_tensors_in_worn_blobs_are_stored_again(tmp_path: Path) -> None:
    store, saved = small_folder(tmp_path / "store"), {f"w{n}": cells(1 / 4, seed=n) for n in range(40)}
    store.save(saved, step=0)
    for tensor in [*saved.values()][::4] + [*saved.values()][1::2]:
        tensor.add_(1)
    store.save(saved, step=1)
    written = store.save(saved, step=2).commit.committed
    assert written.bytes_written > 0
    assert not {ref.uploader for ref in refs(store, 2)} & {ref.uploader for ref in refs(store, 0)}
    assert same_state(store.read("latest"), saved)


def test_small_tensors_of_a_missing_blob_are_stored_again(tmp_path: Path) -> None:
    store, saved = small_folder(tmp_path / "store"), {f"w{n:02}": cells(1 / 4, seed=n) for n in range(80)}
    store.save(saved, step=0)
    first, *others = refs(store, 0)
    assert others
    (tmp_path / "store" / blob_key(first.uploader, first.hash)).unlink()
    store.save(saved, step=1)
    assert set(others) < set(refs(store, 1))
    assert first not in refs(store, 1)
    assert same_state(store.read("latest"), saved)


def test_a_small_tensor_is_split_like_the_parents(tmp_path: Path) -> None:
    store, value = small_folder(tmp_path / "store"), cells(1 / 2)
    halves = [Shard(half, tuple(value.shape), (at,)) for at, half in ((0, value[:256]), (256, value[256:]))]
    store.save({"w": halves}, step=0)
    assert store.save({"w": value}, step=1).commit.committed.bytes_written == 0
    assert torch.equal(store.read("latest")["w"], value)


def test_a_small_tensor_that_equals_an_encoded_cell_is_stored_in_full(tmp_path: Path) -> None:
    store, value = small_folder(tmp_path / "store"), torch.arange(CELL // 4, dtype=torch.float32)
    coded = store.save({"w": value}, step=0, compress="always").commit.committed
    assert coded.bytes_coded
    saved = {"other": value.clone(), "w": value}
    store.save(saved, step=1, compress="off")
    assert same_state(store.read("latest"), saved)
