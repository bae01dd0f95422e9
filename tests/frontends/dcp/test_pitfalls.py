"""Eighteen pitfalls of torch.distributed.checkpoint: each test fails if casckpt lacks the countermeasure."""

from __future__ import annotations

import io
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as TorchShard
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import casckpt
from casckpt.contents import manifests
from casckpt.errors import Conflict, InvalidInput, Mismatch
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.frontends.dcp.session import WriterSession
from casckpt.saving.options import SaveOptions
from tests.support.dcp import Chunks, causes, failed, failure, forget_plans, half, load, save
from tests.support.faulty import fail_before
from tests.support.ranks import Pool, outcome_of
from tests.support.together import line, numbers, watched
from tests.support.torch_versions import has_torch, needs_torch

Store = casckpt.Store


# 1: with cached plans, the hooks see the first save's plans, and finish receives the first save's metadata


def cached_saves(rank: int, size: int, path: Path, changed: int) -> None:
    forget_plans()
    store, mesh = casckpt.open(path), line(size)
    try:
        for step in range(3):
            rows = size * (3 if step == changed else 2)
            state = {"a": distribute_tensor(numbers(f"a{step}", rows, 4), mesh, [Shard(0)]), "step": step}
            planner = DefaultSavePlanner(enable_plan_caching=True)
            metadata = save(state, StorageWriter(store, run="cached", step=step), planner=planner)
            found = store.get(f"cached@{step}")
            assert metadata.storage_data == {"checkpoint": found.id}
            assert metadata.storage_meta == StorageMeta(checkpoint_id=f"cached@{step}", save_id=found.commit.txid)
    finally:
        forget_plans()


@needs_torch("2.7", "plan caching")
@pytest.mark.parametrize("changed", [2, 9])
def test_01_cached_plans_from_an_earlier_save_are_not_reused(ranks: Pool, store_path: Path, changed: int) -> None:
    ranks.run(2, cached_saves, store_path, changed)
    store = casckpt.open(store_path)
    uploaders: set[str] = set()
    for step in range(3):
        blobs = manifests.get(store.repository, store.get(f"cached@{step}").commit).blobs
        own = {blob.uploader for blob in blobs}  # all blobs are new
        assert not own & uploaders  # gc may be deleting files from the folder of a finished save
        uploaders |= own
        found = store.read(f"cached@{step}")
        assert torch.equal(found["a"], numbers(f"a{step}", 6 if step == changed else 4, 4))
        assert found["step"] == step
    assert not list((store_path / "transactions").glob("*"))


# 3: a save fails if a writer thread fails, or if no rank wrote a planned item


def test_03_a_planned_value_without_a_result_is_rejected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = WriterSession.finish

    def losing(self: WriterSession, metadata: Any, results: Any) -> None:
        assert self._written is not None
        part = replace(self._written.part, objects=[])
        self._written = replace(self._written, part=part)
        finish(self, metadata, [])

    monkeypatch.setattr(WriterSession, "finish", losing)
    error = failure(lambda: save({"a": torch.ones(2), "b": 3}, StorageWriter(store, step=1)))
    assert "'b' was planned, but no rank stored it" in str(causes(error)[0])
    assert store.checkpoints() == []


class Given:
    """A planner that returns given values."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        return self.data


def test_03_a_tensor_whose_dtype_differs_across_ranks_is_not_saved(store: Store) -> None:
    properties, size, rows = TensorProperties(dtype=torch.float32), torch.Size((4, 2)), torch.Size((2, 2))
    chunks = [ChunkStorageMetadata(torch.Size((start, 0)), rows) for start in (0, 2)]
    asked, sessions = [], []
    for rank, chunk in enumerate(chunks):
        sessions.append(WriterSession(store.repository, SaveOptions(step=1), rank=rank, alone=False))
        data = TensorWriteData(chunk, properties, size)
        item = WriteItem(MetadataIndex("w", chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        asked.append(sessions[rank].local_plan(SavePlan([item])))
    told = sessions[0].begin(asked)
    given = [Given(torch.ones(2, 2)), Given(torch.ones(2, 2).half())]
    results = [one.write(plan, planner) for one, plan, planner in zip(sessions, told, given, strict=True)]
    with pytest.raises(InvalidInput, match=r"'w' is \('float16', \(4, 2\)\) on rank 1, but \('float32'"):
        sessions[0].finish(Metadata({"w": TensorStorageMetadata(properties, size, chunks)}), results)
    assert store.checkpoints() == []


# 4: DCP does not notice holes in a save with a single plan, or in the load of such a save


def test_04_a_tensor_with_a_hole_is_rejected(store: Store) -> None:
    cause = causes(failure(lambda: save({"a": half()}, StorageWriter(store, step=1))))[0]
    if not has_torch("2.9"):  # DCP itself rejects it, before casckpt creates the store
        assert not Path(store.url).exists()
        return
    assert isinstance(cause, InvalidInput)
    assert "'a' of shape [4, 2] is incomplete" in str(cause)
    assert store.checkpoints() == []


# 5: an asynchronous save in a separate process unpickles a new writer each time, in a daemon


def test_05_a_writer_can_be_pickled_between_saves(store: Store) -> None:
    writer = StorageWriter(store, run="a", step=1)
    save({"a": torch.ones(3)}, writer)
    other = pickle.loads(pickle.dumps(writer))
    save({"a": torch.ones(3)}, other, checkpoint_id="a@2")
    assert store.get("a@2").stats.bytes_written == 0


# 6: overlapping asynchronous saves share one writer


class MeetingPlanner(DefaultSavePlanner):
    def __init__(self, meeting: threading.Barrier) -> None:
        super().__init__()
        self.meeting = meeting

    def create_local_plan(self) -> SavePlan:
        self.meeting.wait(60)  # the other save was also set up on the same writer
        return super().create_local_plan()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_06_overlapping_saves_with_one_writer_do_not_interfere(store: Store) -> None:
    writer, meeting = StorageWriter(store), threading.Barrier(2)

    def run(step: int) -> None:
        state = {"a": torch.full((5,), float(step))}
        save_state(state, checkpoint_id=f"b@{step}", storage_writer=writer, planner=MeetingPlanner(meeting))

    threads = [threading.Thread(target=run, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read(f"b@{step}")["a"][0].item() for step in (1, 2)] == [1.0, 2.0]


# 7: ranks that read different metadata wait in different collectives, or load different checkpoints


def load_what_changes(rank: int, size: int, path: Path) -> Any:
    state = {"a": torch.zeros(3)}
    return failed(lambda: load(state, StorageReader(path, f"default@{rank + 1}")))


def test_07_a_load_fails_if_ranks_resolve_different_checkpoints(ranks: Pool, store_path: Path, store: Store) -> None:
    for step in (1, 2):
        store.save({"a": torch.ones(3) * step}, step=step)
    for told in ranks.run(2, load_what_changes, store_path):
        assert told[0][0] == "Conflict"
        assert "refers to 2 different checkpoints across the ranks" in told[0][1]


def load_with_a_failing_rank(rank: int, size: int, path: Path) -> Any:
    faults = [fail_before("get", key="runs/*")] if rank == 1 else []  # DCP retries, so a second read would succeed
    store, _ = watched(path, *faults)
    return failed(lambda: load({"a": torch.zeros(3)}, StorageReader(store, "default@1")))


def test_07_a_rank_that_cannot_read_does_not_use_a_different_checkpoint(
    ranks: Pool, store_path: Path, store: Store
) -> None:
    for run in ("default", "default/rank-0", "default/rank-1"):
        store.save({"a": torch.ones(3)}, run=run, step=1)
    for told in ranks.run(2, load_with_a_failing_rank, store_path):
        assert list(told) == [1]


# 8: empty shards are chunks, at the end of the dimension


def empty_shards(rank: int, size: int, path: Path) -> None:
    state = {
        "few": distribute_tensor(numbers("few", 2, 8), line(size), [Shard(0)]),
        "none": distribute_tensor(torch.zeros(0, 8), line(size), [Shard(0)]),
    }
    save(state, StorageWriter(path, step=1))
    state["few"] = distribute_tensor(torch.zeros(2, 8), line(size), [Shard(0)])
    load(state, StorageReader(path, "default@1"))
    assert torch.equal(state["few"].full_tensor(), numbers("few", 2, 8))


def test_08_empty_shards_are_not_stored(ranks: Pool, store_path: Path) -> None:
    ranks.run(4, empty_shards, store_path)
    found = casckpt.open(store_path).read("default@1")
    assert torch.equal(found["few"], numbers("few", 2, 8))
    assert found["none"].shape == (0, 8)


# 9: {} vanishes; [] and tuples are pickled along with the tensors in them


def test_09_tensors_in_tuples_and_lists_are_stored_as_tensors(store: Store) -> None:
    state = {"pair": (numbers("a", 5), [1, "x"]), "none": [], "gone": {}, "deep": [[(numbers("b", 2),)]]}
    save(state, StorageWriter(store, step=1))
    body = manifests.get(store.repository, store.get("default@1").commit).body
    assert not any(one.pickled for one in body.objects)
    assert set(store.get("default@1").tensors) == {"pair.0", "deep.0.0.0"}
    found = load({"pair": None, "none": None, "deep": [[(torch.zeros(2),)]]}, StorageReader(store, "default@1"))
    assert torch.equal(found["pair"][0], numbers("a", 5))
    assert found["pair"][1] == [1, "x"]
    assert found["none"] == []
    assert torch.equal(found["deep"][0][0][0], numbers("b", 2))
    assert torch.equal(store.read("default@1")["deep"][0][0][0], numbers("b", 2))


# 10: tied tensors are separate keys


def test_10_tied_tensors_are_stored_once(store: Store) -> None:
    weight = numbers("w", 1 << 18)
    save({"in": weight, "out": weight, "copy": weight.clone()}, StorageWriter(store, step=1))
    assert store.get("default@1").stats.bytes_written < 1.1 * weight.nbytes


# 11: a module's extra state is flattened into separate items


class WithExtra(torch.nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return {"scale": torch.ones(2), "recipe": {"margin": 0, "names": ["a"]}}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_11_extra_state_is_restored_as_the_module_returned_it(store: Store) -> None:
    model = WithExtra(2, 2)
    save({"model": model.state_dict()}, StorageWriter(store, step=1))
    other = WithExtra(2, 2)
    found = load({"model": other.state_dict()}, StorageReader(store, "default@1"))
    other.load_state_dict(found["model"])
    assert other.extra["recipe"] == {"margin": 0, "names": ["a"]}
    assert store.read("default@1")["model"]["_extra_state"]["recipe"] == {"margin": 0, "names": ["a"]}


# 12: views: conjugate, negative, parts of larger storages, strided destinations


def test_12_views_are_stored_and_loaded_by_their_visible_elements(store: Store) -> None:
    base = torch.arange(24.0).view(4, 6)
    numbers = torch.complex(base, base + 1)
    state = {"conj": numbers.conj(), "neg": numbers.conj().imag, "part": base[1:3, ::2], "turned": base.t()}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    save(state, StorageWriter(store, step=1))
    assert store.get("default@1").tensors["part"].bytes == 6 * 4
    found = {"conj": torch.zeros(4, 6, dtype=torch.complex64), "neg": torch.zeros(6, 4).t(),
             "part": torch.zeros(9, 9)[2:4, 1:7:2], "turned": torch.zeros(6, 8)[:, ::2]}  # fmt: skip
    load(found, StorageReader(store, "default@1"))
    assert all(torch.equal(found[key], value) for key, value in state.items())


# 13: dtypes that safetensors does not have

E8M0 = pytest.param("float8_e8m0fnu", marks=needs_torch("2.7", "this dtype"))


@pytest.mark.parametrize("name", ["complex32", "complex128", E8M0, "float8_e4m3fn", "uint16", "bool"])
def test_13_every_dtype_is_restored(store: Store, store_path: Path, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    raw = torch.arange(16, dtype=torch.uint8) % (2 if name == "bool" else 255)
    state = {"a": raw.view(dtype)}
    save(state, StorageWriter(store, step=1))
    found = load({"a": torch.zeros(16, dtype=torch.uint8).view(dtype)}, StorageReader(store, "default@1"))
    assert torch.equal(found["a"].view(torch.uint8), raw)
    assert store.get("default@1").tensors["a"].dtype == name
    (seen,) = StorageReader(store, "default@1").read_metadata().state_dict_metadata.values()
    assert isinstance(seen, TensorStorageMetadata)
    assert seen.properties.dtype == dtype
    for blob in store_path.rglob("*.safetensors"):
        assert load_file(blob)["0"].nbytes == 16  # any safetensors reader can open it


# 14: DCP silently converts to a different dtype


def test_14_a_different_dtype_is_converted_and_logged_or_rejected(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    save({"a": torch.arange(4.0), "c": torch.ones(2, dtype=torch.complex64)}, StorageWriter(store, step=1))
    found = load({"a": torch.zeros(4, dtype=torch.float16)}, StorageReader(store, "default@1"))
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert "converted to the dtype of the target tensor: a" in caplog.text
    strict = StorageReader(store, "default@1", cast=False)
    error = failure(lambda: load({"a": torch.zeros(4, dtype=torch.float16)}, strict))
    assert isinstance(causes(error)[0], Mismatch)
    error = failure(lambda: load({"c": torch.zeros(2)}, StorageReader(store, "default@1")))
    assert "torch cannot convert" in str(causes(error)[0])


# 15: several chunks of one key on one rank; partial sums


class CarelessPlanner(DefaultSavePlanner):
    """Plans partial sums as if they were complete, as torch before 2.10 does."""

    def create_local_plan(self) -> SavePlan:
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
        data = TensorWriteData(chunk, TensorProperties(), torch.Size([2]))
        item = WriteItem(MetadataIndex("p", torch.Size([0])), WriteItemType.SHARD, tensor_data=data)
        self.plan = SavePlan([item], planner_data=self.mappings)
        return self.plan


def several_chunks(rank: int, size: int, path: Path) -> Any:
    full = numbers("a", 8, 2)

    def sharded(data: torch.Tensor) -> Any:
        rows = [r for r in range(4) if r % size == rank]
        shards = [TorchShard.from_tensor_and_offsets(data[2 * r : 2 * r + 2].clone(), [2 * r, 0], rank) for r in rows]
        return init_from_local_shards(shards, 8, 2)

    save({"a": sharded(full)}, StorageWriter(path, step=1))
    back = sharded(torch.zeros(8, 2))
    load({"a": back}, StorageReader(path, "default@1"))
    for one in back.local_shards():
        at = one.metadata.shard_offsets[0]
        assert torch.equal(one.tensor, full[at : at + 2])
    partial = {"p": DTensor.from_local(torch.ones(2), line(size), [Partial()])}
    planners = DefaultSavePlanner(), CarelessPlanner()
    return [failed(lambda: save(partial, StorageWriter(path, step=2), planner=planner)) for planner in planners]  # noqa: B023 - called at once


def test_15_a_rank_can_hold_several_chunks_of_a_key(ranks: Pool, store_path: Path) -> None:
    for by_torch, by_us in ranks.run(2, several_chunks, store_path):
        assert sorted(by_torch) == ([0, 1] if has_torch("2.10") else [0])  # before, torch plans them too
        assert all("holds partial sums" in text for _, text in by_us.values())
    store = casckpt.open(store_path)
    assert torch.equal(store.read("default@1")["a"], numbers("a", 8, 2))
    assert len(store.checkpoints()) == 1


def test_15_a_user_type_can_provide_its_chunks(store: Store) -> None:
    full = numbers("a", 4, 2)
    state: dict[str, Any] = {"a": Chunks(torch.Size((4, 2)), {(0, 0): full[:1], (1, 0): full[1:]})}
    save(state, StorageWriter(store, step=1))
    assert torch.equal(store.read("default@1")["a"], full)
    into = {"a": Chunks(torch.Size((4, 2)), {(0, 1): torch.zeros(4, 1)})}
    load(into, StorageReader(store, "default@1"))
    assert torch.equal(into["a"].held[0, 1], full[:, 1:])


# 16: chunk hints count the chunks of all ranks in a save, but only this rank's chunks in a load


class HintlessPlanner(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = [replace(i, storage_index=replace(i.storage_index, index=99)) for i in plan.items]
        return replace(plan, items=items)


def test_16_a_load_does_not_rely_on_index_hints(store: Store) -> None:
    full = numbers("c", 4, 2)
    chunks = Chunks(full.size(), {(0, 0): full[:1], (1, 0): full[1:]})  # their hints are 0 and 1
    save({"a": numbers("a", 6), "b": 3, "c": chunks}, StorageWriter(store, step=1))
    into = {"a": torch.zeros(6), "b": 0, "c": torch.zeros(4, 2)}
    found = load(into, StorageReader(store, "default@1"), planner=HintlessPlanner())
    assert torch.equal(found["a"], numbers("a", 6))
    assert torch.equal(found["c"], full)
    assert found["b"] == 3


# 17: tensors that wrap other tensors have no memory of their own


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # torch's own is typed as a function
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(str(func))


def test_17_the_error_for_a_tensor_without_memory_names_the_key(store: Store) -> None:
    error = failure(lambda: save({"q": Wrapper(torch.ones(3))}, StorageWriter(store, step=1)))
    assert "'q'" in str(causes(error)[0])
    assert "no memory of its own" in str(causes(error)[0])
    assert store.checkpoints() == []


# 18: "a.b" next to a -> b


def test_18_two_paths_with_the_same_flat_key_are_rejected(store: Store) -> None:
    error = failure(lambda: save({"a.b": 1, "a": {"b": 2}}, StorageWriter(store, step=1)))
    assert "a.b" in str(causes(error)[0])
    error = failure(lambda: save({"a.0": torch.ones(1), "a": (torch.ones(2),)}, StorageWriter(store, step=1)))
    assert "the same flat key 'a.0'" in str(causes(error)[0])
    assert store.checkpoints() == []


# assumptions of these tests


def test_conflict_errors_are_not_wrapped(store: Store) -> None:
    save({"a": torch.ones(1)}, StorageWriter(store, step=1))
    error = failure(lambda: save({"a": torch.ones(1)}, StorageWriter(store, step=1)))
    assert isinstance(causes(error)[0], Conflict)
    assert isinstance(outcome_of(lambda: StorageWriter(store, run="/")), InvalidInput)
    assert isinstance(pickle.loads(pickle.dumps(io.BytesIO(b"x"))), io.BytesIO)
