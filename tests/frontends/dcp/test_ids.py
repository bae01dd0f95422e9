"""IDs and paths name the checkpoint to save or load. A different thread may have set up the writer."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import Shard, distribute_tensor

import casckpt
from casckpt.errors import InvalidInput, StorageError
from casckpt.frontends.dcp import StorageReader, StorageWriter
from tests.support.dcp import causes, failed, failure, load, save
from tests.support.faulty import fail_before
from tests.support.ranks import Pool
from tests.support.together import line, numbers, watched
from tests.support.torch_versions import needs_torch

try:
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
except ImportError:  # an older torch, whose metadata lacks the version
    CURRENT_DCP_VERSION = None  # type: ignore[assignment,misc]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning")


Store = casckpt.Store


def places(store: Store) -> list[tuple[str, int]]:
    return [(one.run, one.step) for one in store.checkpoints()]


# paths, as in training loops that save into folders


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("/ckpt/step-5", "ckpt/step@5"),
        ("ckpt/step-5/", "ckpt/step@5"),
        ("./ckpt//step-00005", "ckpt/step@5"),
        (Path("/outputs/llama 3.1").with_name("7"), "outputs@7"),
        ("outputs/iter_0000100", "outputs/iter@100"),
        ("a/checkpoint5", "a/checkpoint@5"),
        ("s3://bucket/run/step-5", "s3/bucket/run/step@5"),
        ("last", "last@0"),
        ("/ckpt/last", "ckpt/last@0"),
        ("/ckpt/model-v2/last", "ckpt/model-v2/last@0"),
        ("sft@100", "sft@100"),
        ("100", "mine@100"),
        ("20261123", "mine@20261123"),  # eight digits alone could be the beginning of an id
    ],
)
def test_an_id_names_the_same_checkpoint_in_saves_and_loads(store: Store, id: Any, place: str) -> None:
    save({"x": torch.ones(2)}, StorageWriter(store, run="mine"), checkpoint_id=id)
    save({"x": torch.zeros(2)}, StorageWriter(store, run="another", step=1))
    assert f"{store.checkpoints()[0].run}@{store.checkpoints()[0].step}" == place
    for reader, more in ((StorageReader(store, run="mine"), {"checkpoint_id": id}), (StorageReader(store, place), {})):
        assert load({"x": torch.zeros(2)}, reader, **more)["x"].tolist() == [1, 1]
    assert StorageWriter.validate_checkpoint_id(id)
    assert StorageReader.validate_checkpoint_id(id)


@pytest.mark.parametrize(
    "id", ["latest", "tag:best", "sft@latest", "deface", "a b/step-1", "../x/1", "", ".", "/", 6, "a-" + "9" * 5000]
)
def test_an_id_that_a_save_cannot_use_is_rejected(store: Store, id: Any) -> None:
    with pytest.raises(InvalidInput, match=r"(?i)pass 'RUN@STEP'"):
        StorageWriter(store).reset(id)
    assert not StorageWriter.validate_checkpoint_id(id)


def test_a_reader_accepts_references(store: Store) -> None:
    save({"x": 1}, StorageWriter(store), checkpoint_id="/ckpt/step-5")
    store.tag("best", "ckpt/step@5")
    for ref in ("latest", "tag:best", "ckpt/step@latest", store.get("latest").id[:12], "/ckpt/step-5"):
        assert load({"x": 0}, StorageReader(store, ref)) == {"x": 1}
    with pytest.raises(InvalidInput):
        StorageReader(store).reset("/a b/5")
    assert not StorageReader.validate_checkpoint_id("/a b/5")


def existing_loop(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    writer, reader = StorageWriter(store), StorageReader(store)
    for step in (5, 10):
        save({"x": step}, writer, checkpoint_id=f"/ckpt/step-{step}")
    again = failure(lambda: save({"x": 6}, writer, checkpoint_id="/ckpt/step-5"))
    save({"own": rank}, writer, checkpoint_id="/alone/5", use_collectives=False)
    assert load({"own": None}, reader, checkpoint_id="/alone/5") == {"own": rank}
    return str(again), [load({"x": 0}, reader, checkpoint_id=f"/ckpt/step-{step}")["x"] for step in (5, 10)]


@needs_torch("2.9", "use_collectives")
def test_a_training_loop_can_save_into_folders_on_all_ranks(ranks: Pool, store_path: Path) -> None:
    for again, found in ranks.run(2, existing_loop, store_path):
        assert "ckpt/step@5 already exists" in again
        assert "overwrite=True" in again
        assert found == [5, 10]
    found = places(casckpt.open(store_path))
    assert found[:2] == [("ckpt/step", 5), ("ckpt/step", 10)]
    assert sorted(found[2:]) == [("alone/rank-0", 5), ("alone/rank-1", 5)]


def test_a_training_loop_can_overwrite_its_last_checkpoint(store: Store) -> None:
    big = torch.arange(1 << 16)
    writer = StorageWriter(store, overwrite=True)
    for step in range(3):
        save({"x": step, "big": big}, writer, checkpoint_id="last")
    assert places(store) == [("last", 0)]
    assert store.get("last@0").stats.bytes_written == 0
    assert load({"x": 0}, StorageReader(store), checkpoint_id="last") == {"x": 2}


# a writer that is set up in one thread and used in a different thread or process


def test_reset_applies_to_a_background_save(store: Store) -> None:
    writer = StorageWriter(store, run="r", step=1, overwrite=True)
    save({"x": 1}, writer)
    writer.reset("r@5")
    async_save({"x": 5}, storage_writer=writer).result()  # type: ignore[union-attr] # a future
    assert places(store) == [("r", 1), ("r", 5)]
    async_save({"x": 6}, storage_writer=writer, checkpoint_id="r@6").result()  # type: ignore[union-attr] # a future
    save({"x": 7}, writer)  # as in DCP: the last target, whichever call set it
    assert [store.read(f"r@{step}")["x"] for step in (1, 5, 6)] == [1, 5, 7]


def test_reset_applies_in_the_process_that_saves(store: Store) -> None:
    writer = StorageWriter(store, run="r", step=1)
    writer.reset("r@5")
    save({"x": 5}, pickle.loads(pickle.dumps(writer)))
    assert places(store) == [("r", 5)]


def test_the_id_set_by_a_thread_overrides_later_ids_set_by_other_threads(store: Store) -> None:
    writer = StorageWriter(store, run="r")
    writer.reset("r@1")
    other = threading.Thread(target=writer.reset, args=("r@2",))
    other.start()
    other.join()
    save({"x": 1}, writer)
    assert places(store) == [("r", 1)]
    save({"x": 2}, writer)  # the writer's own target has been used
    assert places(store) == [("r", 1), ("r", 2)]


# 2: if an error does not survive pickling, the ranks wait for each other


class TwoTexts(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)
        self.lock = threading.Lock()


class FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        raise TwoTexts("no data", "today")


def failing_save(rank: int, size: int, path: Path) -> Any:
    planner = FailingPlanner() if rank == 1 else DefaultSavePlanner()
    state = {"a": distribute_tensor(numbers("a", 4, 4), line(size), [Shard(0)])}
    return failed(lambda: save(state, StorageWriter(path, step=1), planner=planner))


def test_02_every_rank_receives_the_text_of_an_error_that_cannot_be_pickled(ranks: Pool, store_path: Path) -> None:
    for told in ranks.run(2, failing_save, store_path):
        assert told == {1: ("RankFailed", "TwoTexts: no data")}
    assert casckpt.open(store_path).checkpoints() == []


# 3: a save fails if a writer thread fails, or if no rank wrote a planned item


def test_03_a_failed_writer_thread_fails_the_save(store_path: Path) -> None:
    store, storage = watched(store_path)
    store.create(blob_bytes=1 << 20)
    storage.inject(fail_before("put", at=2, times=9, key="objects/*.safetensors"))
    state = {str(i): numbers(str(i), 1 << 18) for i in range(8)}
    error = failure(lambda: save(state, StorageWriter(store, step=1, threads=2)))
    assert isinstance(causes(error)[0], StorageError)
    assert store.checkpoints() == []
    assert storage.count("put", "commits/*") == 1  # the save ended its transaction at once
    storage.heal()
    save(state, StorageWriter(store, step=1, threads=2))
    assert torch.equal(store.read("default@1")["7"], state["7"])
