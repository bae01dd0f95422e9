"""Loads through torch.distributed.checkpoint, with the default planner and with user-defined planners."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem

import casckpt
from casckpt.errors import Damaged, ForgottenWarning, MissingKey, NotFound, StorageError
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.frontends.dcp import reader as reading
from tests.support.counting import count_io
from tests.support.dcp import causes, failure, load, save
from tests.support.faulty import corrupt
from tests.support.renames import rename_in
from tests.support.together import numbers, watched
from tests.support.torch_versions import has_torch
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


Store = casckpt.Store


# features


def test_a_partial_load_leaves_missing_values_unchanged(store: Store) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    state = {"a": torch.zeros(2), "new": torch.full((2,), 3.0)}
    with pytest.raises(BaseException, match="Missing key in checkpoint state_dict: new"):
        load(dict(state), StorageReader(store, "default@1"))
    load(state, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert [value.tolist() for value in state.values()] == [[1, 1], [3, 3]]


def test_a_partial_load_fails_if_the_names_do_not_match(store: Store) -> None:
    save({"a": torch.ones(2), "b": torch.ones(2)}, StorageWriter(store, step=1))
    state = {"model.a": torch.zeros(2), "model.b": torch.zeros(2)}

    def by(**options: Any) -> None:
        reader = StorageReader(store, "default@1", **options)
        load(state, reader, planner=DefaultLoadPlanner(allow_partial_load=True))

    error = causes(failure(by))[0]
    assert isinstance(error, MissingKey)
    assert "would fill 0 of 2 tensors from default@1" in str(error)
    assert rename_in(str(error)) == {r"model\.(.*)": r"\1"}
    by(unread="ignore")
    assert not any(value.any() for value in state.values())


def test_a_partial_load_logs_how_many_tensors_it_filled(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    state = {"a": torch.zeros(2), "new": torch.zeros(2)}
    with caplog.at_level(logging.WARNING):
        load(state, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert "filled 1 of 2 tensors from default@1; left unchanged: 'new'." in caplog.messages


def test_checkpoint_id_names_the_checkpoint(store: Store) -> None:
    writer, reader = StorageWriter(store, run="a"), StorageReader(store)
    save({"x": 1}, writer, checkpoint_id="b@4")
    save({"x": 2}, writer, checkpoint_id="5")
    assert [(c.run, c.step) for c in store.checkpoints()] == [("b", 4), ("a", 5)]
    assert load({"x": 0}, reader, checkpoint_id="b@latest") == {"x": 1}
    assert load({"x": 0}, reader, checkpoint_id="latest") == {"x": 2}
    with pytest.raises(BaseException, match=r"RUN@STEP"):
        save({}, StorageWriter(store))
    error = failure(lambda: load({"x": 0}, StorageReader(store)))
    assert "pass ref=" in str(causes(error)[0])
    error = failure(lambda: load({"x": 0}, StorageReader(store, "b@9")))
    assert "has no step 9" in str(causes(error)[0])


def test_a_load_through_dcp_reads_only_overlapping_cells(store_path: Path) -> None:
    store, _ = watched(store_path)
    full = numbers("w", 2048, 1024)  # 8 MiB, rows of 4 KiB
    save({"w": full}, StorageWriter(store, step=1))
    for at, shape, cells in (((512, 0), (256, 1024), 0), ((0, 128), (2048, 128), None)):
        for verify in (False, True):
            opened = casckpt.open(store_path)
            counts = count_io(opened.repository.storage)
            part = Slab(full.shape, at, torch.zeros(shape))
            load({"w": part}, StorageReader(opened, "default@1", verify=verify))
            assert torch.equal(part.data_, full[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]])
            if cells is not None:
                assert counts.bytes_read <= 1.05 * part.data_.nbytes + 30_000


class Slab(torch.Tensor):
    """A box of a tensor that a load fills."""

    at: tuple[int, ...]
    data_: torch.Tensor

    @staticmethod
    def __new__(cls: type[Slab], shape: torch.Size, at: tuple[int, ...], data: torch.Tensor) -> Slab:
        made: Slab = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=data.dtype)
        made.at, made.data_ = at, data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # torch's own is typed as a function
        raise NotImplementedError(f"{func} of a box that is only loaded")

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.at), self.data_.size())]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        raise NotImplementedError("only loaded")

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.data_


def test_the_error_for_damage_names_affected_keys(store_path: Path) -> None:
    store, storage = watched(store_path)
    save({"a": numbers("a", 5000)}, StorageWriter(store, step=1))
    storage.inject(corrupt("read_into"))
    error = failure(lambda: load({"a": torch.zeros(5000)}, StorageReader(store, "default@1")))
    assert isinstance(causes(error)[0], Damaged)
    assert "'a'" in str(causes(error)[0])
    storage.heal()
    for blob in store_path.glob("objects/*/*.safetensors"):
        blob.unlink()
    error = failure(lambda: load({"a": torch.zeros(5000)}, StorageReader(store, "default@1")))
    assert "it is gone" in str(causes(error)[0])


def test_a_reader_warns_about_forgotten_checkpoints(store: Store) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    id = store.get("default@1").id
    store.forget("default@1")
    with pytest.warns(ForgottenWarning, match="the next gc may purge it"):
        load({"a": torch.zeros(2)}, StorageReader(store, id))


def test_a_reader_names_missing_keys(tmp_path: Path) -> None:
    error = failure(lambda: load({"a": 1}, StorageReader(tmp_path / "none", "default@1")))
    assert isinstance(causes(error)[0], NotFound)
    assert "there is no store" in str(causes(error)[0])
    with pytest.raises(NotFound):
        StorageReader(tmp_path / "none", "default@1").read_metadata()


def test_a_reused_reader_names_missing_keys(store: Store) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    reader = StorageReader(store, "default@1")
    load({"a": torch.zeros(2)}, reader)
    store.forget("default@1")
    target = {"a": torch.zeros(2)}
    for _ in range(2):
        error = failure(lambda: load(target, reader))
        assert isinstance(causes(error)[0], NotFound)
        assert target["a"].eq(0).all()


@pytest.mark.parametrize("error", [StorageError("503"), MemoryError("all is full")])
def test_every_kind_of_error_is_raised_by_a_reader(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    get = store.get

    def failing(ref: str) -> Any:
        if ref == "default@1" or ref.startswith("other/rank-0@"):
            raise error
        return get(ref)

    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    monkeypatch.setattr(store, "get", failing)
    first_and_second_call = ("default@1", "other@1") if has_torch("2.9") else ("default@1",)
    for ref in first_and_second_call:
        found = causes(failure(lambda ref=ref: load({"a": torch.zeros(2)}, StorageReader(store, ref))))[0]  # type: ignore[misc]
        assert type(found) is type(error)
        assert str(error) in str(found)


# the examples in torch's documentation of planners


class RenamingLoad(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.kept = state_dict
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        key = read_item.dest_index.fqn.removeprefix("foo_")
        self.kept[key] = torch.load(value, weights_only=True)


def test_a_planner_can_rename_on_load(store: Store) -> None:
    store.save({"foo_a": torch.ones(2), "foo_n": 3}, step=1)
    state = load({"a": torch.zeros(2), "n": 0}, StorageReader(store, "default@1"), planner=RenamingLoad())
    assert identical(state, {"a": torch.ones(2), "n": 3})


class Balancing(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        rows = zip(*zip_longest(*iters), strict=True)
        items_per_rank = [[item for item in items if item is not None] for items in rows]
        plans = [replace(plan, items=items) for plan, items in zip(all_plans, items_per_rank, strict=True)]
        return super().create_global_plan(plans)


def test_a_save_planner_can_balance_the_load(store: Store) -> None:
    state = {f"a{i}": numbers(f"a{i}", 10) for i in range(5)}
    save(state, StorageWriter(store, step=1), planner=Balancing())
    assert identical(store.read("default@1"), state)


class Materializing(DefaultLoadPlanner):
    """A planner that allocates the tensors of a meta model when it loads them."""

    def create_local_plan(self) -> LoadPlan:
        self.made: dict[str, torch.Tensor] = {}
        return super().create_local_plan()

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        meta = self.state_dict[index.fqn]
        return self.made.setdefault(index.fqn, torch.empty_like(meta, device="cpu"))


class Meta(torch.Tensor):
    """A meta tensor. DCP does not allocate it, but the planner does, on the process group's device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute of Tensor
        return torch.device("cpu")


def test_a_planner_can_materialize_a_meta_model(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WINDOW_BYTES", 100)
    state = {f"l{i}": numbers(f"l{i}", 4, 4) for i in range(5)}
    save(state, StorageWriter(store, step=1))
    planner = Materializing()
    template: dict[str, Any] = {k: torch.empty_like(v, device="meta").as_subclass(Meta) for k, v in state.items()}
    load(template, StorageReader(store, "default@1"), planner=planner)
    assert identical({key: value.as_subclass(torch.Tensor) for key, value in planner.made.items()}, state)


def test_a_planner_that_recreates_tensors_holds_only_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WINDOW_BYTES", 100)
    start = torch.Size([0])
    at = MetadataIndex("a", start)
    items = [ReadItem(LoadItemType.TENSOR, at, start, at, start, torch.Size([n])) for n in (6, 6, 7, 5)]
    items.append(ReadItem(LoadItemType.BYTE_IO, at, start, at, start, torch.Size([1])))
    assert [len(window) for window in reading._windows(items, Materializing())] == [2, 2]  # 8 bytes per element
    assert [len(window) for window in reading._windows(items, DefaultLoadPlanner())] == [4]


# notes


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """DCP logs every step."""
    with caplog.at_level(logging.ERROR):
        yield
