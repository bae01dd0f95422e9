"""Imports of folders that Megatron-core wrote."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

import casckpt
from casckpt.frontends import megatron
from casckpt.frontends.convert import dcp_to_casckpt
from casckpt.frontends.dcp.folder import FlatBox
from tests.support import gpt
from tests.support.dcp import QUIET
from tests.support.gpt import Topology, differences
from tests.support.megatron_core import core
from tests.support.ranks import Pool
from tests.support.saves import same_state
from tests.support.torch_dist_folder import FLAT_FOLDER, FOLDER, flat_state, state


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("imported")
    dcp_to_casckpt(FOLDER, path, run="core", step=7)
    return f"{path}#core@7"


def loaded(rank: int, size: int, where: str, topology: Topology) -> list[Any]:
    found = megatron.load(gpt.emptied(state(rank, topology)), where)
    return differences(found, gpt.expected(state(rank, topology)))


def test_a_model_loads_in_a_different_configuration(where: str, ranks: Pool) -> None:
    assert ranks.run(2, loaded, where, Topology(pp=2)) == [[], []]
    assert loaded(0, 1, where, Topology()) == []


def test_other_contents_of_a_torch_dist_folder_are_imported(where: str) -> None:
    path, _, ref = where.partition("#")
    assert {"common.pt", "metadata.json"} <= set(casckpt.open(path).attachments(ref))
    assert megatron.maybe_load_config(where) == megatron.CheckpointingConfig("torch_dist")
    metadata = megatron.load_sharded_metadata(where)
    assert metadata["layers.attention"].global_shape == (gpt.LAYERS, gpt.HIDDEN, gpt.HIDDEN)
    assert metadata["layers._extra_state/shard_3_4"] == megatron.ShardedObject("layers._extra_state", None, (4,), (3,))
    assert megatron.load_common_state_dict(where)["iteration"] == 7


def test_the_metadata_of_older_versions_of_megatron_core_is_read(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "folder")
    older = object.__new__(core(".strategies.torch").MCoreMetadata)
    vars(older).update(vars(pickle.loads((FOLDER / ".metadata").read_bytes())), mcore_data={})
    (tmp_path / "folder/.metadata").write_bytes(pickle.dumps(older))
    dcp_to_casckpt(tmp_path / "folder", tmp_path / "store", run="core", step=7)
    assert loaded(0, 1, f"{tmp_path}/store#core@7", Topology()) == []


def test_an_object_with_the_name_of_the_common_part_is_refused(tmp_path: Path) -> None:
    own = megatron.ShardedObject("common_state", {"x": 1}, (1,), (0,))
    with pytest.raises(megatron.CheckpointingException, match="'common_state/shard_0_1' would load as the common part"):
        megatron.save({"own": own, "iteration": 4}, f"{tmp_path}/store#own@1")


@pytest.mark.filterwarnings(f"ignore:{QUIET}")
@pytest.mark.parametrize("common", [[1, 2], {"iteration": 5}])
def test_a_common_part_that_cannot_be_merged_is_an_error(tmp_path: Path, common: Any) -> None:
    boxed = {"common_state/shard_0_1": [common], "iteration": 9, "w": torch.zeros(1)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state_dict_saver.save(boxed, checkpoint_id=tmp_path / "folder", planner=planner, no_dist=True)
    shutil.copy(FOLDER / "metadata.json", tmp_path / "folder")
    dcp_to_casckpt(tmp_path / "folder", tmp_path / "store", run="core", step=5)
    with pytest.raises(megatron.CheckpointingException, match="two values for the same position"):
        megatron.load_common_state_dict(f"{tmp_path}/store#core@5")


@pytest.mark.filterwarnings(f"ignore:{QUIET}")
def test_the_common_part_is_an_object_from_megatron_core_0_19_on(tmp_path: Path) -> None:
    common = {"iteration": 5, "nested": {"lr": [1e-3]}, "mean": torch.ones(2)}
    boxed = {"common_state/shard_0_1": [common], "rng/shard_0_1": [{"seed": 1}], "w": torch.arange(3.0)}
    folder, where = tmp_path / "folder", f"{tmp_path}/store#core@5"
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state_dict_saver.save(boxed, checkpoint_id=folder, planner=planner, no_dist=True)
    shutil.copy(FOLDER / "metadata.json", folder)
    dcp_to_casckpt(folder, tmp_path / "store", run="core", step=5)
    assert same_state(megatron.load_common_state_dict(where), common)
    assert list(megatron.load_sharded_metadata(where)) == ["w", "rng/shard_0_1"]
    assert list(megatron.load_plain_tensors(where)) == ["w"]
    wanted = {"w": megatron.ShardedTensor.from_rank_offsets("w", torch.zeros(3))}
    found, missing, unexpected = megatron.load(wanted, where, strict="return_all")
    assert same_state(found, common | {"w": boxed["w"]})
    assert (missing, unexpected) == ({"rng"}, set())


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("flat")
    dcp_to_casckpt(FLAT_FOLDER, path, run="core", step=7)
    return f"{path}#core@7"


def loaded_flat(rank: int, size: int, where: str, topology: Topology) -> list[Any]:
    """Return the paths of values that differ by more than CPUs differ in the last bits of ``torch.randn``."""
    found = dict(gpt.leaves(megatron.load(gpt.emptied(flat_state(rank, topology)), where)))
    expected = dict(gpt.leaves(gpt.expected(flat_state(rank, topology))))
    if found.keys() != expected.keys():
        return [*found, *expected]
    return [path for path, value in found.items() if not is_close(value, expected[path])]


def is_close(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return gpt.same(one, other)
    return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("topology", [Topology(tp=4), Topology(pp=2, cut=0.3), Topology(tp=2, dp=2)], ids=str)
def test_flat_state_loads_in_a_different_configuration(flat: str, topology: Topology, ranks: Pool) -> None:
    assert ranks.run(topology.size, loaded_flat, flat, topology) == [[]] * topology.size


def test_flat_state_is_loaded_with_the_shape_of_its_parameter(flat: str) -> None:
    """The folder pads the vocabulary to 16 rows, but a single process pads it to 12."""
    path, _, ref = flat.partition("#")
    shapes = {key: info.shape for key, info in casckpt.open(path).get(ref).tensors.items()}
    prefix = "optimizer.state.exp_avg_sq"
    assert shapes == {
        f"{prefix}.embedding.weight": (16, gpt.HIDDEN),
        f"{prefix}.layers.attention": (gpt.LAYERS, gpt.HIDDEN, gpt.HIDDEN),
        f"{prefix}.layers.norm": (gpt.LAYERS, gpt.HIDDEN),
        f"{prefix}.layers.fc1": (gpt.LAYERS, 8 * gpt.FFN, gpt.HIDDEN),
    }
    assert loaded_flat(0, 1, flat, Topology()) == []


def test_torch_dist_metadata_is_read_if_pickle_is_allowed(tmp_path: Path) -> None:
    dcp_to_casckpt(FLAT_FOLDER, tmp_path, run="core", step=7, allow_pickle=True)
    assert loaded_flat(0, 1, f"{tmp_path}#core@7", Topology()) == []


def test_a_box_is_extracted_from_the_middle_of_a_chunk() -> None:
    box = FlatBox(MetadataIndex("w"), 1, (0, 0), (2, 2))
    assert box.out_of(torch.arange(7.0)).tolist() == [[1, 2], [3, 4]]
    assert box.out_of(torch.arange(3.0)).tolist() == [1, 2]  # the result is too short, which the caller notices


class Odd:
    """Not plain data."""


def test_a_common_part_with_other_types_needs_pickle(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "folder")
    torch.save({"odd": Odd()}, tmp_path / "folder/common.pt")
    dcp_to_casckpt(tmp_path / "folder", tmp_path / "store", run="core", step=7)
    where = f"{tmp_path}/store#core@7"
    with pytest.raises(megatron.CheckpointingException, match="allow_pickle=True"):
        megatron.load_common_state_dict(where)
    assert isinstance(megatron.load_common_state_dict(where, allow_pickle=True)["odd"], Odd)
    assert "layers.norm" in megatron.load_plain_tensors(where)
