"""A checkpoint as DCP sees it: its metadata and its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

import casckpt
from casckpt.frontends.dcp import StorageReader, StorageWriter, casckpt_to_dcp
from tests.support.dcp import failure, load, save

try:
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
except ImportError:  # an older torch, whose metadata lacks the version
    CURRENT_DCP_VERSION = None  # type: ignore[assignment,misc]

from casckpt.contents import manifests
from casckpt.errors import Mismatch
from casckpt.format.sections.index import TENSOR
from tests.support.dcp import causes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning")


Store = casckpt.Store


def test_dcp_produces_the_same_streams_as_the_native_api(store: Store) -> None:
    state = {"m": {"b": torch.ones(2), "a": torch.ones(3)}, "x": (torch.ones(1), 2)}
    save(state, StorageWriter(store, run="dcp", step=1))
    store.save(state, run="native", step=1)
    one, other = (manifests.get(store.repository, store.get(ref).commit).body for ref in ("dcp@1", "native@1"))
    assert [e.name for e in one.entries if e.kind == TENSOR] == [e.name for e in other.entries if e.kind == TENSOR]
    assert one.tree == other.tree


def test_tied_tensors_load_equal_values_and_reject_different_ones(store: Store) -> None:
    """If casckpt kept both values, one would overwrite the other, and a load would report damage."""
    store.save({"a": torch.ones(3000), "b": torch.zeros(3000), "c": torch.ones(3000)}, step=1)
    shared = torch.full((3000,), 5.0)
    load({"a": shared, "c": shared}, StorageReader(store, "default@1"))
    assert shared.eq(1).all()
    error = causes(failure(lambda: load({"a": shared, "b": shared}, StorageReader(store, "default@1"))))[0]
    assert isinstance(error, Mismatch)
    assert "'a' and 'b' share memory here" in str(error)
    assert shared.eq(1).all()


class Told(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.told = storage_meta
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_metadata_identifies_its_save_and_can_be_loaded(store: Store, tmp_path: Path) -> None:
    writer, planner, second = StorageWriter(store, run="r"), Told(), Told()
    written = save_state({"x": torch.ones(2)}, storage_writer=writer, planner=planner, checkpoint_id="/ckpt/step-5")
    save_state({"x": torch.ones(2)}, storage_writer=writer, planner=second, checkpoint_id="/ckpt/step-6")
    assert planner.told.checkpoint_id == "ckpt/step@5"
    assert planner.told.save_id
    assert second.told.save_id not in (None, planner.told.save_id)
    reader = StorageReader(store, "ckpt/step@5")
    read = reader.read_metadata()
    assert read.storage_meta is not None
    assert written.storage_meta is not None
    assert read.storage_meta.save_id == written.storage_meta.save_id == store.get("ckpt/step@5").commit.txid
    assert read.storage_data == written.storage_data == {"checkpoint": store.get("ckpt/step@5").id}
    assert read.storage_meta.checkpoint_id == written.storage_meta.checkpoint_id == "ckpt/step@5"
    first = read.storage_meta.load_id
    reader.reset()
    again = reader.read_metadata().storage_meta
    assert again is not None
    assert again.load_id not in (None, first)
    casckpt_to_dcp(store, "ckpt/step@5", tmp_path / "out")
    out = FileSystemReader(tmp_path / "out").read_metadata()
    for one in (read, written, out):
        assert getattr(one, "version", None) == CURRENT_DCP_VERSION
    assert out.storage_meta is not None
    assert out.storage_meta.save_id == read.storage_meta.save_id


def test_the_metadata_has_every_field_that_torch_defines(store: Store, tmp_path: Path) -> None:
    """A reader that uses a field of torch's metadata finds it in casckpt's metadata. ``modules`` is always empty."""
    state = {"x": torch.ones(2), "n": 1}
    save(state, StorageWriter(store, step=1))
    save(state, FileSystemWriter(tmp_path / "torch"))
    ours, theirs = (
        r.read_metadata() for r in (StorageReader(store, "default@1"), FileSystemReader(tmp_path / "torch"))
    )
    for one, other in ((ours, theirs), (ours.storage_meta, theirs.storage_meta)):
        unset = {name for name, value in vars(one).items() if value is None}
        assert unset <= {name for name, value in vars(other).items() if value is None}
