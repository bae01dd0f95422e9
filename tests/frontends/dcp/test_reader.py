"""Saves and loads through torch.distributed.checkpoint, in one process: its features, and the planners of its users."""

from __future__ import annotations

import enum
import io
import json
import logging
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import casckpt
from casckpt.contents import manifests
from casckpt.errors import Damaged, ForgottenWarning, InvalidInput, Mismatch, MissingKey, NotFound, StorageError
from casckpt.format.sections.index import TENSOR
from casckpt.frontends.dcp import PickleFreeLoadPlanner, PickleFreeSavePlanner, StorageReader, StorageWriter
from casckpt.frontends.dcp import reader as reading
from casckpt.frontends.dcp.planners import ValueStream, value_of
from tests.support.dcp import causes, failure, load, save, zeros
from tests.support.exact import same
from tests.support.faulty import corrupt
from tests.support.renames import rename_in
from tests.support.together import numbers, watched
from tests.support.training import Network, identical, train

Store = casckpt.Store
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Network(1)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optim, range(steps))
    return model, optim


PLAIN: dict[str, Any] = {
    "step": 7, "loss": 0.25, "nan": float("nan"), "name": "x", "flags": [True, None], "pair": (1, "b"),
    "big": 1 << 80, "array": np.arange(3000, dtype=np.int16), "scalar": np.float32(2), "size": torch.Size((1, 2)),
    "dtype": torch.bfloat16, "bytes": b"y" * 9000, "ordered": OrderedDict(a=1), "path": Path("a/b"),
}  # fmt: skip


# what is stored is what the native API stores


@pytest.mark.parametrize("name", ["allow_pickel", "owners", "process_group", "no_dist"])
def test_a_keyword_that_no_writer_has_is_named(store: Store, name: str) -> None:
    options: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        StorageWriter(store, step=1, **options)


def test_a_model_and_its_optimizer_come_back_through_either_door(store: Store) -> None:
    model, optim = trained()
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    figures = {"loss": 1.5, "grad": float("inf")}
    save(
        state,
        StorageWriter(store, run="dcp", step=1, metadata={"loss": 1.5}, metrics=figures, healthy=False, health=True),
    )
    store.save(state, run="native", step=1)
    assert store.get("native@1").stats.bytes_written == 0  # the same cells
    assert store.get("dcp@1").metadata == {"loss": 1.5}
    assert (store.get("dcp@1").metrics, store.get("dcp@1").healthy) == (figures, False)
    assert (store.get("dcp@1").health or {}).keys() == store.get("dcp@1").tensors.keys()
    for ref in ("dcp@1", "native@1"):
        through_dcp = {"model": zeros(model.state_dict()), "optim": Optim(optim).state_dict()}
        load(through_dcp, StorageReader(store, ref))
        assert identical(dict(through_dcp["model"]), dict(state["model"]))
        assert identical(through_dcp["optim"], state["optim"])
        native = {"model": zeros(model.state_dict()), "optim": None}
        store.load(native, ref)
        assert identical(dict(native["model"]), dict(state["model"]))
        assert native["optim"]["param_groups"] == state["optim"]["param_groups"]


class Optim:
    """The state of an optimizer with its numbers gone."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        found = optim.state_dict()
        self.state = {"state": zeros(found["state"]), "param_groups": [dict.fromkeys(g) for g in found["param_groups"]]}

    def state_dict(self) -> dict[str, Any]:
        return self.state


def test_plain_values_are_kept_without_a_pickle(store: Store) -> None:
    save(PLAIN, StorageWriter(store, run="dcp", step=1))
    store.save(PLAIN, run="native", step=1)
    body = manifests.get(store.repository, store.get("dcp@1").commit).body
    assert not any(one.pickled for one in body.objects)
    assert body.notes == {}
    for ref in ("dcp@1", "native@1"):
        assert same(store.read(ref), {**PLAIN, "ordered": store.read(ref)["ordered"]})
        found = load({key: None for key in PLAIN if key != "ordered"}, StorageReader(store, ref))
        assert all(same(found[key], PLAIN[key]) for key in found)


class Colour(enum.Enum):
    RED = 1


def test_what_only_a_pickle_holds_needs_leave_to_be_loaded(store: Store) -> None:
    state = {"colour": Colour.RED, "parameters": (nn.Parameter(torch.ones(2)),), "a": 1}
    save(state, StorageWriter(store, step=1))
    assert load({"a": 0}, StorageReader(store, "default@1"))["a"] == 1
    found = load({"parameters": None}, StorageReader(store, "default@1"))  # the restricted unpickler reads this one
    assert isinstance(found["parameters"][0], nn.Parameter)
    error = failure(lambda: load({"colour": None}, StorageReader(store, "default@1")))
    assert "allow_pickle=True" in str(causes(error)[0])
    assert load({"colour": None}, StorageReader(store, "default@1", allow_pickle=True))["colour"] is Colour.RED
    with pytest.raises(InvalidInput, match=r"colour is stored as a pickle.*allow_pickle=True"):
        store.read("default@1")
    assert store.read("default@1", allow_pickle=True)["colour"] is Colour.RED
    assert store.read("default@1", keys=["parameters*", "a"])["a"] == 1


class Json(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return super().transform_object(write_item, object)


class FromJson(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = json.loads(value.read())


class Evil(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(pickle.dumps(Run()))


class Run:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_bytes_of_a_planner_come_back_to_it_and_are_unpickled_by_nobody_else(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"a": [1, 2], "t": (3, "x")}, StorageWriter(store, step=1), planner=Json())
    found = load({"a": None, "t": None}, StorageReader(store, "default@1"), planner=FromJson())
    assert found == {"a": [1, 2], "t": [3, "x"]}
    assert store.read("default@1")["a"] == b"[1, 2]"
    save({"a": 1}, StorageWriter(store, step=2), planner=Evil())
    for ref in ("default@1", "default@2"):
        error = failure(lambda ref=ref: load({"a": None}, StorageReader(store, ref)))  # type: ignore[misc] # mypy on defaults
        assert "allow_pickle=True" in str(causes(error)[0])
    assert capsys.readouterr().out == ""


def test_planners_without_pickle(store: Store) -> None:
    state = {"model": {"w": numbers("w", 3)}, "two": (torch.ones(2), 3), "groups": [{"lr": 0.1}]} | PLAIN
    save(state, StorageWriter(store, step=1), planner=PickleFreeSavePlanner())
    into = {"model": {"w": torch.zeros(3)}, "two": None, "groups": [{"lr": 0}]} | dict.fromkeys(PLAIN)
    del into["ordered"]
    load(into, StorageReader(store, "default@1"), planner=PickleFreeLoadPlanner())
    assert all(same(into[key], PLAIN[key]) for key in into if key in PLAIN)
    assert into["groups"] == [{"lr": 0.1}]
    assert torch.equal(into["two"][0], torch.ones(2))
    error = failure(lambda: save({"c": Colour.RED}, StorageWriter(store, step=2), planner=PickleFreeSavePlanner()))
    assert isinstance(causes(error)[0], InvalidInput)
    save({"c": Colour.RED}, StorageWriter(store, step=2, allow_pickle=True), planner=PickleFreeSavePlanner())
    with_leave = StorageReader(store, "default@2", allow_pickle=True)
    assert load({"c": None}, with_leave, planner=PickleFreeLoadPlanner())["c"] is Colour.RED
    assert value_of(io.BytesIO(ValueStream([3, "x"]).getvalue())) == [3, "x"]  # of a stream that went to a process


def test_a_state_that_is_not_flattened_is_one_value_a_key(store: Store) -> None:
    state = {"model.w": torch.ones(2), "rest": {"a": {"b": 1}, "t": torch.zeros(3)}}
    save(state, StorageWriter(store, step=1), planner=DefaultSavePlanner(flatten_state_dict=False))
    into = {"model.w": torch.zeros(2), "rest": None}
    load(into, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(False, flatten_sharded_tensors=False))
    assert identical(into, state)
    assert store.read("default@1")["rest"]["a"] == {"b": 1}


def test_an_empty_state(store: Store) -> None:
    save({}, StorageWriter(store, step=1, attachments={"a.json": b"{}", "long": b"x" * 5000}))
    assert store.read("default@1") == {}
    assert store.read_attachment("default@1", "long") == b"x" * 5000


def test_a_list_of_which_dcp_tells_a_part(store: Store) -> None:
    """DCP has no word for what is empty."""
    state = {"l": [{}, {"x": torch.ones(2)}, {"y": 1}], "whole": [{"z": 1}, {"x": torch.ones(2)}]}
    save(state, StorageWriter(store, step=1))
    assert identical(store.read("default@1"), state | {"l": {1: {"x": torch.ones(2)}, 2: {"y": 1}}})
    told = StorageReader(store, "default@1").read_metadata()
    assert told.planner_data["l.1.x"] == ("l", 1, "x")


# features


def test_stateful_objects(store: Store) -> None:
    model, _ = trained()
    save({"model": model}, StorageWriter(store, step=1))
    other = Network(5)
    load({"model": other}, StorageReader(store, "default@1"))
    assert identical(dict(other.state_dict()), dict(model.state_dict()))


def test_keys_of_a_checkpoint_whoever_saved_it(store: Store) -> None:
    state = {"model": {"a": numbers("a", 4), "b": {"c": 5}}, "steps": {0: torch.ones(1)}, "l": [{"x": 1}, {"x": 2}]}
    state |= {"nested": [[torch.ones(2), 1], 2]}
    save(state, StorageWriter(store, run="dcp", step=1))
    store.save(state, run="native", step=1)
    for ref in ("dcp@1", "native@1"):
        whole = _load_state_dict_from_keys(storage_reader=StorageReader(store, ref))
        assert identical(whole, state | {"steps": {"0": torch.ones(1)}})
        assert "nested.0.0" in StorageReader(store, ref).read_metadata().state_dict_metadata
        part = _load_state_dict_from_keys({"model.b", "l"}, storage_reader=StorageReader(store, ref))
        assert part == {"model": {"b": {"c": 5}}, "l": [{"x": 1}, {"x": 2}]}


def test_a_partial_load_leaves_what_is_missing(store: Store) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    state = {"a": torch.zeros(2), "new": torch.full((2,), 3.0)}
    with pytest.raises(BaseException, match="Missing key in checkpoint state_dict: new"):
        load(dict(state), StorageReader(store, "default@1"))
    load(state, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert [value.tolist() for value in state.values()] == [[1, 1], [3, 3]]


def test_a_partial_load_that_misses_its_tensors_by_their_names_fails(store: Store) -> None:
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


def test_a_partial_load_says_how_many_tensors_it_filled(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    state = {"a": torch.zeros(2), "new": torch.zeros(2)}
    with caplog.at_level(logging.WARNING):
        load(state, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert "filled 1 of 2 tensors from default@1; left unchanged: 'new'." in caplog.messages


def test_checkpoint_id_names_the_place(store: Store) -> None:
    writer, reader = StorageWriter(store, run="a"), StorageReader(store)
    save({"x": 1}, writer, checkpoint_id="b@4")
    save({"x": 2}, writer, checkpoint_id="5")
    assert [(c.run, c.step) for c in store.checkpoints()] == [("b", 4), ("a", 5)]
    assert load({"x": 0}, reader, checkpoint_id="b@latest") == {"x": 1}
    assert load({"x": 0}, reader, checkpoint_id="latest") == {"x": 2}
    with pytest.raises(BaseException, match=r"RUN@STEP"):
        save({}, StorageWriter(store))
    error = failure(lambda: load({"x": 0}, StorageReader(store)))
    assert "give ref=" in str(causes(error)[0])
    error = failure(lambda: load({"x": 0}, StorageReader(store, "b@9")))
    assert "has no step 9" in str(causes(error)[0])


def test_options_of_a_save(store: Store) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    save({"a": torch.zeros(2)}, StorageWriter(store, step=1, overwrite=True, ephemeral=True))
    assert torch.equal(store.read("default@1")["a"], torch.zeros(2))
    assert store.get("default@1").ephemeral
    with pytest.raises(InvalidInput, match="dedup"):
        StorageWriter(store, step=1, dedup="what")  # type: ignore[arg-type] # that it is refused is the point
    with pytest.raises(InvalidInput, match="threads"):
        StorageReader(store, "a@1", threads=0)


def test_a_resave_writes_the_changed_cells(store: Store) -> None:
    big = {f"backbone.{i}": numbers(f"b{i}", 1 << 18) for i in range(24)}
    head = numbers("head", 1 << 18)
    save(big | {"head": head}, StorageWriter(store, step=1))
    save(big | {"head": head + 1}, StorageWriter(store, step=2))
    assert head.nbytes <= store.get("default@2").stats.bytes_written <= 1.02 * head.nbytes
    save(big | {"head": head + 2}, StorageWriter(store, step=3, frozen=["backbone.*"]))
    assert store.get("default@3").stats.bytes_written <= 1.02 * head.nbytes


def test_only_what_overlaps_is_read(store_path: Path) -> None:
    store, _ = watched(store_path)
    full = numbers("w", 2048, 1024)  # 8 MiB, rows of 4 KiB
    save({"w": full}, StorageWriter(store, step=1))
    for at, shape, cells in (((512, 0), (256, 1024), 0), ((0, 128), (2048, 128), None)):
        for verify in (False, True):
            opened = casckpt.open(store_path)
            storage: Any = opened.repository.storage
            part = Slab(full.shape, at, torch.zeros(shape))
            load({"w": part}, StorageReader(opened, "default@1", verify=verify))
            assert torch.equal(part.data_, full[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]])
            if cells is not None:
                assert storage.counts.bytes_read <= 1.05 * part.data_.nbytes + 30_000


class Slab(torch.Tensor):
    """A box of a tensor, to be loaded."""

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


def test_damage_is_an_error_that_names_what_is_hit(store_path: Path) -> None:
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


def test_a_reader_warns_of_what_was_forgotten(store: Store) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    id = store.get("default@1").id
    store.forget("default@1")
    with pytest.warns(ForgottenWarning, match="the next gc may purge it"):
        load({"a": torch.zeros(2)}, StorageReader(store, id))


def test_a_reader_says_what_is_not_there(tmp_path: Path) -> None:
    error = failure(lambda: load({"a": 1}, StorageReader(tmp_path / "none", "default@1")))
    assert isinstance(causes(error)[0], NotFound)
    assert "there is no store" in str(causes(error)[0])
    with pytest.raises(NotFound):
        StorageReader(tmp_path / "none", "default@1").read_metadata()


def test_a_reader_that_read_says_what_is_not_there_the_next_time(store: Store) -> None:
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
def test_a_reader_says_what_went_wrong_wherever_it_did(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    get = store.get

    def failing(ref: str) -> Any:
        if ref == "default@1" or ref.startswith("other/rank-0@"):
            raise error
        return get(ref)

    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    monkeypatch.setattr(store, "get", failing)
    for ref in ("default@1", "other@1"):  # in the first call, and in the second
        found = causes(failure(lambda ref=ref: load({"a": torch.zeros(2)}, StorageReader(store, ref))))[0]  # type: ignore[misc]
        assert type(found) is type(error)
        assert str(error) in str(found)


# the patterns of torch's own documentation of planners


class RenamingSave(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)


def test_pattern_rename_on_save(store: Store) -> None:
    save({"a": {"w": torch.ones(2)}, "n": 3}, StorageWriter(store, step=1), planner=RenamingSave())
    assert identical(store.read("default@1"), {"foo_a": {"w": torch.ones(2)}, "foo_n": 3})


class RenamingLoad(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.kept = state_dict
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        key = read_item.dest_index.fqn.removeprefix("foo_")
        self.kept[key] = torch.load(value, weights_only=True)


def test_pattern_rename_on_load(store: Store) -> None:
    store.save({"foo_a": torch.ones(2), "foo_n": 3}, step=1)
    state = load({"a": torch.zeros(2), "n": 0}, StorageReader(store, "default@1"), planner=RenamingLoad())
    assert identical(state, {"a": torch.ones(2), "n": 3})


class Fp16Save(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found: Any = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.float16)


class SilentFp16Save(Fp16Save):
    """Its metadata tell of float32."""

    def create_local_plan(self) -> SavePlan:
        return DefaultSavePlanner.create_local_plan(self)


@pytest.mark.parametrize("planner", [Fp16Save, SilentFp16Save])
def test_pattern_cast_on_save(store: Store, planner: type[DefaultSavePlanner], monkeypatch: pytest.MonkeyPatch) -> None:
    from casckpt.frontends.dcp import items

    monkeypatch.setattr(items, "WINDOW_BYTES", 1000)  # several windows
    state = {f"a{i}": numbers(f"a{i}", 100) for i in range(7)} | {"n": 1}
    save(state, StorageWriter(store, step=1), planner=planner())
    assert {info.dtype for info in store.get("default@1").tensors.values()} == {"float16"}
    into = load(zeros(state), StorageReader(store, "default@1"))
    assert all(torch.equal(into[f"a{i}"], numbers(f"a{i}", 100).half().float()) for i in range(7))
    assert into["n"] == 1
    told: Any = StorageReader(store, "default@1").read_metadata().state_dict_metadata["a0"]
    assert told.properties.dtype == torch.float16


class Balancing(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        rows = zip(*zip_longest(*iters), strict=True)
        items_per_rank = [[item for item in items if item is not None] for items in rows]
        plans = [replace(plan, items=items) for plan, items in zip(all_plans, items_per_rank, strict=True)]
        return super().create_global_plan(plans)


def test_pattern_balance_the_load(store: Store) -> None:
    state = {f"a{i}": numbers(f"a{i}", 10) for i in range(5)}
    save(state, StorageWriter(store, step=1), planner=Balancing())
    assert identical(store.read("default@1"), state)


class ExtraData(DefaultSavePlanner):
    data: Any = "per-rank-custom-data"

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=self.data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=[plan.planner_data for plan in plans])


class PickledExtra(ExtraData):
    data = Colour.RED


def test_pattern_extra_planner_data(store: Store) -> None:
    state = {"a": torch.ones(2), "b": 1}
    save(state, StorageWriter(store, step=1), planner=ExtraData(flatten_state_dict=False))
    assert StorageReader(store, "default@1").read_metadata().planner_data == ["per-rank-custom-data"]
    into = {"a": torch.zeros(2), "b": 0}
    load(into, StorageReader(store, "default@1"), planner=DefaultLoadPlanner(False, flatten_sharded_tensors=False))
    assert identical(into, state)
    error = failure(lambda: save(state, StorageWriter(store, step=2), planner=PickledExtra(flatten_state_dict=False)))
    assert "planner_data" in str(causes(error)[0])
    assert "allow_pickle=True" in str(causes(error)[0])
    save(state, StorageWriter(store, step=2, allow_pickle=True), planner=PickledExtra(flatten_state_dict=False))
    reader = StorageReader(store, "default@2", allow_pickle=True)
    assert reader.read_metadata().planner_data == [Colour.RED]
    with pytest.raises(InvalidInput, match="allow_pickle=True"):
        StorageReader(store, "default@2").read_metadata()


class Materialising(DefaultLoadPlanner):
    """Tensors of a meta model come to be when they are loaded."""

    def create_local_plan(self) -> LoadPlan:
        self.made: dict[str, torch.Tensor] = {}
        return super().create_local_plan()

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        meta = self.state_dict[index.fqn]
        return self.made.setdefault(index.fqn, torch.empty_like(meta, device="cpu"))


class Meta(torch.Tensor):
    """A meta tensor that DCP does not materialise by itself, which it does on the device of the process group."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute of Tensor
        return torch.device("cpu")


def test_pattern_materialise_a_meta_model(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WINDOW_BYTES", 100)
    state = {f"l{i}": numbers(f"l{i}", 4, 4) for i in range(5)}
    save(state, StorageWriter(store, step=1))
    planner = Materialising()
    template: dict[str, Any] = {k: torch.empty_like(v, device="meta").as_subclass(Meta) for k, v in state.items()}
    load(template, StorageReader(store, "default@1"), planner=planner)
    assert identical({key: value.as_subclass(torch.Tensor) for key, value in planner.made.items()}, state)


def test_a_planner_that_makes_tensors_anew_has_few_of_them_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WINDOW_BYTES", 100)
    start = torch.Size([0])
    at = MetadataIndex("a", start)
    items = [ReadItem(LoadItemType.TENSOR, at, start, at, start, torch.Size([n])) for n in (6, 6, 7, 5)]
    items.append(ReadItem(LoadItemType.BYTE_IO, at, start, at, start, torch.Size([1])))
    assert [len(window) for window in reading._windows(items, Materialising())] == [2, 2]  # of 8 bytes an element
    assert [len(window) for window in reading._windows(items, DefaultLoadPlanner())] == [4]


# notes


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """DCP logs every step it takes."""
    with caplog.at_level(logging.ERROR):
        yield


def test_streams_are_those_of_the_native_api(store: Store) -> None:
    state = {"m": {"b": torch.ones(2), "a": torch.ones(3)}, "x": (torch.ones(1), 2)}
    save(state, StorageWriter(store, run="dcp", step=1))
    store.save(state, run="native", step=1)
    one, other = (manifests.get(store.repository, store.get(ref).commit).body for ref in ("dcp@1", "native@1"))
    assert [e.name for e in one.entries if e.kind == TENSOR] == [e.name for e in other.entries if e.kind == TENSOR]
    assert one.tree == other.tree


def test_tensors_of_one_memory_that_differ_in_the_checkpoint(store: Store) -> None:
    """Else the one that is overwritten would be taken for damaged."""
    store.save({"a": torch.ones(3000), "b": torch.zeros(3000), "c": torch.ones(3000)}, step=1)
    shared = torch.full((3000,), 5.0)
    load({"a": shared, "c": shared}, StorageReader(store, "default@1"))
    assert shared.eq(1).all()
    error = causes(failure(lambda: load({"a": shared, "b": shared}, StorageReader(store, "default@1"))))[0]
    assert isinstance(error, Mismatch)
    assert "'a' and 'b' share memory here" in str(error)
    assert shared.eq(1).all()
