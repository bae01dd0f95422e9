"""A save writes only changes. The exact numbers come from statistics and from the storage itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.contents import blobs, manifests
from casckpt.errors import Damaged
from casckpt.format.blob import DATA_OFFSET, RECORD_BYTES, most_data
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.tensors.values import Shard
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect
from tests.support.repositories import meanwhile, memory
from tests.support.rewrites import move
from tests.support.saves import (
    BLOB,
    CELL,
    blob_keys,
    cells,
    counted,
    data_of,
    flip,
    manifest_keys,
    reopened,
    same_state,
    small,
    small_folder,
)

AROUND = DATA_OFFSET + 2 * RECORD_BYTES  # the header and proof of a blob of less than 64 KiB


def manifest_of(store: Store, ref: str) -> Manifest:
    return manifests.get(store.repository, store.get(ref).commit)


def saved(store: Store, state: Any, step: int, **options: Any) -> int:
    """Check that a save and the storage agree on the number of written blob bytes. Return this number."""
    before = {key: store.repository.storage.size(key) or 0 for key in blob_keys(store)}
    with counted(store) as io:
        stats = store.save(state, step=step, **options).stats
    new = [store.repository.storage.size(key) or 0 for key in blob_keys(store) if key not in before]
    assert (stats.bytes_written, stats.blobs_written) == (sum(new), len(new))
    assert io.bytes_written - sum(new) < 100_000  # the manifest and records
    assert same_state(reopened(store).read(f"{options.get('run', 'default')}@{step}"), state)
    return stats.bytes_written


def data_bytes(store: Store, state: Any, step: int, **options: Any) -> int:
    """Return the same number without the headers and proofs of blobs."""
    before = set(blob_keys(store))
    saved(store, state, step, **options)
    return sum(data_of(store, key) for key in set(blob_keys(store)) - before)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return small() if request.param == "memory" else small_folder(tmp_path / "store")


def test_saving_an_unchanged_state_writes_no_blobs(store: Store) -> None:
    state = {"w": cells(40.5), "t": cells(20).view(128, -1).t(), "x": {"y": torch.arange(3)}}
    assert saved(store, state, 1) > 60 * CELL
    for step in (2, 3):
        ckpt = store.save(state, step=step)
        assert (ckpt.stats.bytes_written, ckpt.stats.blobs_written) == (0, 0)
        assert ckpt.stats.bytes_reused == ckpt.stats.bytes_total
        assert ckpt.stats.blobs_reused == len(blob_keys(store))


def test_changing_one_of_a_hundred_tensors_costs_only_its_own_bytes(store: Store) -> None:
    state = {f"layer.{i}": cells(3) for i in range(100)}
    saved(store, state, 1)
    state["layer.37"] += 1
    assert data_bytes(store, state, 2) == 3 * CELL
    assert store.diff("default@1", "default@2").changed == ("layer.37",)


def test_changing_ten_embedding_rows_costs_only_their_cells(store: Store) -> None:
    table = torch.randn(4000, 64)  # 16 rows per cell
    saved(store, {"embedding": table}, 1)
    rows = [0, 1, 15, 16, 500, 501, 1000, 2000, 3000, 3999]
    table[rows] += 1
    touched = {row // 16 for row in rows}
    assert data_bytes(store, {"embedding": table}, 2) == len(touched) * CELL
    assert store.diff("default@1", "default@2").bytes_changed == len(touched) * CELL


def test_tied_and_constant_tensors_are_stored_once(store: Store) -> None:
    weight = cells(5)
    state = {"embed": weight, "head": weight, "flat": weight.view(-1, 32), "copy": weight.clone()}
    assert data_bytes(store, state, 1) == 5 * CELL
    zeros = {"m": torch.zeros(50 * CELL // 4), "v": torch.zeros(20 * CELL // 4), "z": torch.zeros(7 * CELL // 8)}
    assert data_bytes(store, zeros, 2) == CELL + CELL // 2  # one full cell and one short cell
    assert data_bytes(store, zeros | {"more": torch.zeros(3 * CELL // 4)}, 3) == 0


def test_equal_bytes_with_a_different_dtype_are_shared(store: Store) -> None:
    weight = cells(4)
    saved(store, {"w": weight}, 1)
    assert data_bytes(store, {"w": weight.view(torch.int32), "x": weight.view(torch.uint8)}, 2) == 0


def test_a_renamed_or_moved_key_is_shared(store: Store) -> None:
    state = {f"l{i}": cells(3) for i in range(10)}
    saved(store, state, 1)
    assert saved(store, {"model": {f"block.{i}": state[f"l{i}"] for i in reversed(range(10))}}, 2) == 0


def test_adding_a_tensor_costs_only_its_own_bytes(store: Store) -> None:
    weight = cells(20)
    saved(store, {"w": weight[: 10 * CELL // 4]}, 1)
    assert data_bytes(store, {"w": weight}, 2) == 10 * CELL


def test_many_small_tensors_are_reused(store: Store) -> None:
    state = {f"n{i}": torch.full((3,), float(i)) for i in range(500)}
    assert data_bytes(store, state, 1) == 500 * 12
    assert len(blob_keys(store)) == 1
    state["n7"] = torch.zeros(3)  # the value of n0
    assert saved(store, state, 2) == 0
    state["n8"] = torch.full((3,), -1.0)
    assert data_bytes(store, state, 3) == 12


def test_a_new_run_reuses_cells_of_its_base_run(store: Store) -> None:
    base, head = {"backbone": cells(30)}, {"head": cells(2)}
    saved(store, base, 0, run="base")
    assert data_bytes(store, base | head, 1, run="sft") == 2 * CELL
    assert saved(store, base | head, 2, run="sft") == 0
    assert saved(store, base | head, 1, run="other") == 0


def test_a_process_reuses_cells_that_another_process_saved_after_its_own_last_save(store: Store) -> None:
    first, second = {"w": cells(2)}, {"w": cells(2)}
    saved(store, first, 0)
    reopened(store).save(second, step=1)
    assert saved(store, second, 2) == 0


def test_a_process_reuses_cells_of_its_own_last_save_where_they_are_now(store: Store) -> None:
    state = {"w": cells(40.5)}
    commit = store.save(state, step=1).commit
    other = Repository(store.repository.storage)
    move(other, commit)
    collect(other)
    assert saved(store, state, step=2) == 0


def test_a_tensor_that_a_state_gains_is_reused_from_another_run(store: Store) -> None:
    base, head = {"backbone": cells(3)}, {"head": cells(2)}
    reopened(store).save(base, run="base", step=0)
    saved(store, head, 0, run="tuned")
    assert saved(store, base | head, 1, run="tuned") == 0


def test_a_save_of_another_run_in_the_meantime_does_not_prevent_reuse() -> None:
    """Two threads may save different runs."""
    storage = FaultyStore(memory(near=False))
    store, state = small(storage), {"w": cells(10)}
    store.save(state, run="a", step=1)
    other = meanwhile(lambda: store.save({"v": cells(1)}, run="b", step=1))
    storage.inject(call_first("list", other, key="damaged/"))
    assert store.save(state, run="a", step=2).stats.bytes_written == 0
    assert {ckpt.run for ckpt in store.checkpoints()} == {"a", "b"}


def test_a_run_reuses_forgotten_checkpoints_but_not_purged_ones(store: Store) -> None:
    state = {"w": cells(10)}
    saved(store, state, 1)
    store.forget("default@1")
    assert saved(store, state, 2) == 0


ROWS: dict[str, Callable[[torch.Tensor, int], list[Shard]]] = {
    "rows": lambda w, n: [
        Shard(part, tuple(w.shape), offset=(i * w.shape[0] // n, 0)) for i, part in enumerate(w.chunk(n))
    ],
    "columns": lambda w, n: [
        Shard(part, tuple(w.shape), offset=(0, i * w.shape[1] // n)) for i, part in enumerate(w.chunk(n, dim=1))
    ],
    "flat": lambda w, n: [
        Shard(part, tuple(w.shape), flat=(i * w.numel() // n, (i + 1) * w.numel() // n))
        for i, part in enumerate(w.reshape(-1).chunk(n))
    ],
}


@pytest.mark.parametrize("split", ROWS)
def test_different_topologies_share_cells(store: Store, split: str) -> None:
    weight = torch.randn(128, 120)
    shards = ROWS[split]

    def written(parts: Any, step: int) -> int:
        ckpt = store.save({"w": parts}, step=step)
        assert torch.equal(store.read(f"default@{step}")["w"], weight)
        return ckpt.stats.bytes_written

    assert written(shards(weight, 8), 1) > weight.nbytes
    assert [written(shards(weight, n), 2 + i) for i, n in enumerate((4, 2, 8))] == [0, 0, 0]
    assert written(weight, 7) == 0
    assert [written(shards(weight, n), 10 + i) for i, n in enumerate((8, 1, 4))] == [0, 0, 0]


def test_additional_shards_cost_only_cells_at_new_boundaries() -> None:
    store, weight = small(), torch.randn(1024, 40)
    store.save({"w": weight}, step=1)
    ckpt = store.save({"w": ROWS["rows"](weight, 4)}, step=2)
    assert ckpt.stats.bytes_written <= AROUND + 3 * CELL
    assert torch.equal(store.read("default@2")["w"], weight)


def test_overlapping_flat_parts_do_not_affect_the_next_save() -> None:
    store, w = small(), torch.randn(4, 4)
    parts = [
        Shard(w[:2, :2], (4, 4), (0, 0), (4, 2), (0, 4)),
        Shard(w[2:, :3], (4, 4), (0, 0), (4, 3), (6, 12)),
        Shard(w[:2, 2:], (4, 4), (0, 2)),
        Shard(w[2:, 3:], (4, 4), (2, 3)),
    ]
    store.save({"w": parts}, step=1)
    store.save({"w": w}, step=2)
    assert torch.equal(store.read("default@1")["w"], w)
    assert torch.equal(store.read("default@2")["w"], w)


def test_cells_of_a_different_size_are_not_reused() -> None:
    """After a copy into a store with a different cell size, the state is divided into new cells."""
    store, state = small(cell_bytes=16 << 10), {"w": cells(64)}
    store.save(state, step=1)
    store.repository._marker = None
    marker = store.repository.storage.get("casckpt.json", limit=10_000)
    store.repository.storage.replace("casckpt.json", marker.replace(b"16384", b"4096"))
    again = reopened(store)
    assert again.save(state, step=2).stats.bytes_written >= 64 * CELL
    assert same_state(again.read("default@2"), state)
    assert again.save(state, step=3).stats.bytes_written == 0


class TestWorn:
    """A save abandons blobs of which little is used. Therefore, space is bounded without repacking."""

    @staticmethod
    def live(store: Store, step: int) -> tuple[int, int]:
        """Return (bytes of data in the blobs that a checkpoint refers to, bytes that it uses)."""
        manifest = manifest_of(store, f"default@{step}")
        held = sum(most_data(size) for size in manifest.blob_sizes)
        return held, sum(entry.nbytes for entry in manifest.entries)

    @pytest.mark.in_memory
    @pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
    def test_a_changing_run_needs_bounded_space(self, share: float) -> None:
        store, rng = small(), random.Random(f"{share}")
        state = {f"w{i}": cells(25) for i in range(8)}
        store.save(state, step=0)
        worst = 0.0
        for step in range(1, 25):
            for tensor in state.values():
                parts = tensor.view(25, -1)
                parts[rng.sample(range(25), int(25 * share))] += 1
            store.save(state, step=step)
            held, used = self.live(store, step)
            worst = max(worst, held / used)
        assert worst <= 3
        assert same_state(store.read("default@24"), state)

    def test_the_worst_pattern_of_changes_needs_bounded_space(self) -> None:
        """Keep half of each blob. Then change all cells except one per blob in one go."""
        store, per = small(), BLOB // CELL
        state = {f"w{i}": cells(per) for i in range(6)}
        store.save(state, step=0)
        for step in range(1, 12):
            for tensor in state.values():
                tensor.view(per, -1)[: per // 2 if step % 2 else per - 1] += 1
            store.save(state, step=step)
            held, used = self.live(store, step)
            assert held <= 3 * used

    def test_an_unchanged_state_writes_only_cells_of_worn_blobs(self) -> None:
        store, per = small(), BLOB // CELL
        state = {f"w{i}": cells(per) for i in range(4)}
        store.save(state, step=0)
        assert not any(blob.worn for blob in manifest_of(store, "default@0").blobs)
        state["w0"].view(per, -1)[: per // 2 + 1] += 1
        store.save(state, step=1)
        worn = [blob for blob in manifest_of(store, "default@1").blobs if blob.worn]
        assert len(worn) == 1
        assert data_bytes(store, state, 2) == (per // 2 - 1) * CELL
        assert worn[0].hash not in {blob.hash for blob in manifest_of(store, "default@2").blobs}
        assert saved(store, state, 3) == 0

    def test_cells_moved_out_of_a_worn_blob_are_not_moved_again(self) -> None:
        store, per = small(), BLOB // CELL
        state = {"body": cells(per + 2), "head": cells(2 * per - 2)}
        store.save(state, step=0)
        written = []
        for step in range(1, 7):
            state["head"] += 1
            written.append(data_bytes(store, state, step))
        head = (2 * per - 2) * CELL
        assert written == [head, head + 2 * CELL, head, head, head, head]
        assert same_state(store.read("default@6"), state)

    def test_a_half_used_blob_is_not_worn(self) -> None:
        store, per = small(), BLOB // CELL
        state = {"w": cells(per)}
        store.save(state, step=0)
        state["w"].view(per, -1)[: per // 2] += 1
        assert data_bytes(store, state, 1) == per // 2 * CELL
        assert not any(blob.worn for blob in manifest_of(store, "default@1").blobs)
        assert saved(store, state, 2) == 0

    def test_blobs_of_a_different_live_run_are_not_worn(self) -> None:
        store = small()
        base = {f"w{i}": cells(2) for i in range(8)}
        store.save(base, run="base", step=0)
        part = {"w3": base["w3"]}
        store.save(part, run="sft", step=1)
        assert not any(blob.worn for blob in manifest_of(store, "sft@1").blobs)
        assert store.save(part, run="sft", step=2).stats.bytes_written == 0


class TestDamage:
    """A save does not reuse damaged data, but continues without it."""

    def test_a_damaged_parent_manifest_prevents_only_reuse(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = {"w": cells(10)}
        store.save(state, step=1)
        (key,) = manifest_keys(store)
        flip(store, key, 100)
        again = reopened(store)
        assert data_bytes(again, state, 2) == 10 * CELL
        assert "reuses nothing from default@1" in caplog.text
        with pytest.raises(Damaged, match="default@1"):
            again.read("default@1")
        assert saved(again, state, 3) == 0

    def test_a_missing_parent_manifest_prevents_only_reuse(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = {"w": cells(10)}
        store.save(state, step=1)
        (key,) = manifest_keys(store)
        store.repository.storage.delete(key)
        assert data_bytes(reopened(store), state, 2) == 10 * CELL
        assert "reuses nothing from default@1" in caplog.text

    @pytest.mark.parametrize("first_changed", [False, True], ids=["all alike", "first cell changed"])
    @pytest.mark.parametrize("damage", ["deleted", "truncated", "longer"])
    def test_cells_of_a_missing_or_truncated_blob_are_stored_again(
        self, store: Store, damage: str, first_changed: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """This holds even if the first cell of a tensor changed, so that the others are only found during packing."""
        state = {"w": cells(40), "t": cells(20).view(64, -1).t()}
        store.save(state, step=1)
        lost = _ref(store, blob_keys(store)[0])
        _damage(store, lost, damage)
        if first_changed:
            state["w"][0] += 1
        again = reopened(store)
        written = again.save(state, step=2).stats.bytes_written
        assert lost.size <= written <= lost.size + CELL + AROUND
        assert f"{lost.hash} is missing or truncated" in caplog.text
        assert blobs.damaged_marks(again.repository) == {(lost.uploader, lost.hash)}
        assert lost not in manifest_of(again, "default@2").blobs
        assert same_state(again.read("default@2"), state)
        if damage != "longer":  # its cells are unchanged
            with pytest.raises(Damaged):
                again.read("default@1")
        assert again.save(state, step=3).stats.bytes_written == 0

    def test_a_save_stores_everything_again_if_all_blobs_are_missing(self, store: Store) -> None:
        state = {"w": cells(50)}
        store.save(state, step=1)
        for key in blob_keys(store):
            store.repository.storage.delete(key)
        state["w"][0] += 1
        assert data_bytes(store, state, 2) == 50 * CELL

    @pytest.mark.parametrize("is_own", [True, False])
    def test_a_marked_blob_is_not_reused(self, store: Store, is_own: bool) -> None:
        state = {"w": cells(40)}
        (store if is_own else reopened(store)).save(state, step=1)
        marked = _ref(store, blob_keys(store)[0])
        blobs.mark_damaged(store.repository, marked.uploader, marked.hash, "a test says so")
        assert saved(store, state, 2) == marked.size
        assert marked not in manifest_of(store, "default@2").blobs
        assert saved(store, state, 3) == 0

    def test_a_repaired_blob_is_reused(self, store: Store) -> None:
        state = {"w": cells(4)}
        store.save(state, step=1)
        ref = _ref(store, blob_keys(store)[0])
        blobs.mark_damaged(store.repository, ref.uploader, ref.hash, "a test says so")
        blobs.mark_repaired(store.repository, ref.uploader, ref.hash, "a test says so")
        assert saved(store, state, 2) == 0


def _ref(store: Store, key: str) -> BlobRef:
    refs = [ref for ref in manifest_of(store, "latest").blobs if blob_key(ref.uploader, ref.hash) == key]
    return refs[0]


def _damage(store: Store, ref: BlobRef, how: str) -> None:
    storage, key = store.repository.storage, blob_key(ref.uploader, ref.hash)
    data = storage.get(key, limit=1 << 30)
    storage.delete(key)
    if how != "deleted":
        storage.put(key, data[:-CELL] if how == "truncated" else data + b"\0")


def test_reuse_depends_on_digests_and_not_on_times(tmp_path: Path) -> None:
    """A tensor that changed and changed back is reused."""
    store, weight = small_folder(tmp_path / "s"), cells(4)
    store.save({"w": weight}, step=1)
    kept = weight.clone()
    weight.zero_()
    store.save({"w": weight}, step=2)
    weight.copy_(kept)
    written = store.save({"w": weight}, step=3).stats.bytes_written
    assert written == 4 * CELL + AROUND  # only the newest checkpoint of a run is considered
    assert store.save({"w": weight}, step=4).stats.bytes_written == 0
