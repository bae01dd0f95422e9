"""The advice of the front end for torch.distributed.checkpoint, and of imports of its folders."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.frontends.dcp.converters import dcp_to_casckpt
from tests.frontends.dcp.test_schema import PickledExtra
from tests.hints.conftest import Run
from tests.support.dcp import causes, failed, failure, load, save
from tests.support.hints import Advice, Messages, follows
from tests.support.ranks import Pool

Store = casckpt.Store
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Colour(enum.Enum):
    RED = 1


def cause(call: Any) -> BaseException:
    """Return the cause of the error in a single process."""
    return causes(failure(call))[0]


@follows("frontends/dcp/folder.py:read_metadata", "pass allow_pickle=True (--allow-pickle) if you trust its source")
@pytest.mark.parametrize("way", ["allow_pickle", "--allow-pickle"])
def test_metadata_with_a_pickle_can_be_imported_with_allow_pickle(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    save({"a": torch.ones(2)}, FileSystemWriter(tmp_path / "in"), planner=PickledExtra(flatten_state_dict=False))
    with messages.error(InvalidInput) as advice:
        dcp_to_casckpt(tmp_path / "in", store, step=1)
    if way == "allow_pickle":
        dcp_to_casckpt(tmp_path / "in", store, step=1, **advice.argument(way))
    else:
        run("import", store.url, tmp_path / "in", "--step", 1, advice.says(way))
    assert torch.equal(store.read("default@1")["a"], torch.ones(2))


@follows("frontends/dcp/folder.py:Folder.read_values", "(--allow-pickle) to keep them unchanged")
@pytest.mark.parametrize("way", ["allow_pickle", "--allow-pickle"])
def test_pickled_values_can_be_imported_with_allow_pickle(
    store: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    save({"a": torch.ones(2), "colour": Colour.RED}, FileSystemWriter(tmp_path / "in"))
    with messages.error(InvalidInput) as advice:
        dcp_to_casckpt(tmp_path / "in", store, step=1)
    if way == "allow_pickle":
        dcp_to_casckpt(tmp_path / "in", store, step=1, **advice.argument(way))
    else:
        run("import", store.url, tmp_path / "in", "--step", 1, advice.says(way))
    assert store.read("default@1", allow_pickle=True)["colour"] is Colour.RED


def planned_elsewhere(rank: int, size: int, path: str) -> str:
    """Save a tensor that describes itself but does not give DCP any write items. Return the error."""
    half = DTensor.from_local(torch.full((1, 3), float(rank)), init_device_mesh("cpu", (size,)), [Shard(0)])
    chunk = ChunkStorageMetadata(torch.Size((1 - rank, 0)), torch.Size((1, 3)))
    half._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    store = casckpt.open(path)
    failures = failed(lambda: save({"w": half}, StorageWriter(store, run="d", step=1)))
    advice = Advice(next(text for _, text in failures.values()))
    advice.says("save and load it with casckpt.Store")
    store.save({"w": half}, run="own", step=1)
    half._local_tensor.zero_()
    store.load({"w": half}, "own@1")
    assert (half._local_tensor == rank).all()
    return advice.message


@follows("frontends/dcp/items.py:check_planned", "save and load it with casckpt.Store")
def test_tensors_that_dcp_would_misplace_can_be_saved_natively(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    for message in ranks.run(2, planned_elsewhere, str(store_path)):
        messages.text(message).says("casckpt.Store")
    assert casckpt.open(store_path).read("own@1")["w"].tolist() == [[1] * 3, [0] * 3]


@follows("frontends/dcp/schema.py:Note.encoded", "pass allow_pickle=True to StorageWriter")
def test_planner_data_that_is_not_plain_can_be_stored_with_allow_pickle(store: Store, messages: Messages) -> None:
    planner = PickledExtra(flatten_state_dict=False)

    def attempt(**options: Any) -> None:
        save({"a": torch.ones(2)}, StorageWriter(store, step=1, **options), planner=planner)

    advice = messages.text(cause(attempt))
    attempt(**advice.argument("allow_pickle"))
    assert torch.equal(store.read("default@1")["a"], torch.ones(2))


@follows("frontends/dcp/contents.py:_check_restricted", "pass allow_pickle=True to StorageReader")
def test_a_pickled_value_can_be_loaded_with_allow_pickle(store: Store, messages: Messages) -> None:
    save({"colour": Colour.RED, "a": torch.ones(2)}, StorageWriter(store, step=1))
    state = {"colour": None, "a": torch.zeros(2)}
    advice = messages.text(cause(lambda: load(state, StorageReader(store, "default@1"))))
    found = load(state, StorageReader(store, "default@1", **advice.argument("allow_pickle")))
    assert found["colour"] is Colour.RED


@follows("frontends/dcp/reader.py:StorageReader._metadata", "pass ref=, or pass checkpoint_id=REF to each load")
@follows("frontends/dcp/writer.py:StorageWriter.set_up_storage_writer", "or pass checkpoint_id='RUN@STEP' to each save")
def test_a_store_and_a_checkpoint_can_be_passed_to_the_reader_or_to_the_call(store: Store, messages: Messages) -> None:
    advice = messages.text(cause(lambda: save({"a": torch.ones(1)}, StorageWriter(store))))
    step: Any = {advice.says("step"): 1}
    save({"a": torch.ones(1)}, StorageWriter(store, **step))
    given = {"checkpoint_id": advice.argument("checkpoint_id")["checkpoint_id"].replace("RUN@STEP", "default@2")}
    save({"a": torch.full((1,), 2.0)}, StorageWriter(store), **given)
    advice = messages.text(cause(lambda: load({"a": torch.zeros(1)}, StorageReader(store))))
    ref: Any = {advice.says("ref"): "default@1"}
    assert load({"a": torch.zeros(1)}, StorageReader(store, **ref))["a"] == 1
    given = {advice.says("checkpoint_id"): "default@2"}
    assert load({"a": torch.zeros(1)}, StorageReader(store), **given)["a"] == 2


@follows("frontends/dcp/reader.py:StorageReader._now", "pass the reader to dcp.load")
@follows("frontends/dcp/writer.py:StorageWriter._session", "pass the writer to dcp.save")
def test_readers_and_writers_work_when_they_are_passed_to_dcp_as_advised(store: Store, messages: Messages) -> None:
    writer = StorageWriter(store, step=1)
    with messages.error(InvalidInput) as advice:
        writer.prepare_local_plan(SavePlan([]))
    advice.says("dcp.save")
    save({"a": torch.ones(1)}, writer)
    reader = StorageReader(store, "default@1")
    with messages.error(InvalidInput) as advice:
        reader.prepare_local_plan(LoadPlan([]))
    advice.says("dcp.load")
    assert load({"a": torch.zeros(1)}, reader)["a"] == 1


@follows("frontends/dcp/reader.py:StorageReader._check_fit", "rename the keys accordingly, or use store.load with")
def test_keys_with_different_names_can_be_renamed_on_save_or_on_load(store: Store, messages: Messages) -> None:
    store.save({"net": {"w": torch.ones(2), "b": torch.ones(3)}}, step=1)
    state = {"w": torch.zeros(2), "b": torch.zeros(3)}
    partly = DefaultLoadPlanner(allow_partial_load=True)
    advice = messages.text(cause(lambda: load(state, StorageReader(store, "default@1"), planner=partly)))
    advice.says("rename the keys accordingly")
    named = load({"net": state}, StorageReader(store, "default@1"))
    assert torch.equal(named["net"]["w"], torch.ones(2))
    state = {"w": torch.zeros(2), "b": torch.zeros(3)}
    store.load(state, "default@1", **advice.argument("rename"))
    assert torch.equal(state["b"], torch.ones(3))


@follows("tensors/dtypes.py:check_cast", "pass cast=True to …")
def test_the_suggested_option_converts_a_different_dtype(store: Store, messages: Messages) -> None:
    store.save({"a": torch.ones(2)}, step=1)
    state = {"a": torch.zeros(2, dtype=torch.float64)}
    advice = messages.text(cause(lambda: load(state, StorageReader(store, "default@1", cast=False))))
    assert load(state, StorageReader(store, "default@1", **advice.argument("cast")))["a"].tolist() == [1, 1]
