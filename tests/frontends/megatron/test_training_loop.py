"""Megatron-core's training loop creates its own strategies. After `install`, they save to a store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import casckpt
from casckpt.errors import Conflict
from casckpt.frontends import megatron
from tests.support import gpt
from tests.support.gpt import Topology, differences
from tests.support.megatron_core import core, module, own_state, strategies_of_the_loop, theirs
from tests.support.ranks import Pool
from tests.support.signing import pair

REPLICAS = Topology(dp=2)


def saved_by_the_loop(
    context: dict[str, Any], folder: Path, state: dict[str, Any], *, fully_parallel: bool, asynchronous: bool = False
) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    strategy, _ = strategies_of_the_loop(context, folder, fully_parallel=fully_parallel)
    request = core().save(state, str(folder), strategy, async_sharded_save=asynchronous)
    if asynchronous:
        request.execute_sync()


def a_loop(rank: int, size: int, path: Path, fully_parallel: bool, asynchronous: bool) -> list[Any]:
    core()
    written: list[int] = []
    context: dict[str, Any] = {}
    folders = [path / "runs/iter_0000010", path / "runs/iter_0000020"]
    state = own_state(rank, REPLICAS)
    state["optimizer"].pop("flat", None)  # each rank has its own part, where Megatron expects it
    with megatron.install(path / "store", run="gpt", progress=lambda done, total: written.append(done)):
        for folder in folders:
            saved_by_the_loop(context, folder, theirs(state), fully_parallel=fully_parallel, asynchronous=asynchronous)
        _, load = strategies_of_the_loop(context, folders[1], fully_parallel=fully_parallel)
        found = core().load(theirs(gpt.emptied(state)), str(folders[1]), load)
    return [sorted(os.listdir(folders[1])), differences(found, gpt.expected(state)), max(written) > 0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fully_parallel", [False, True])
def test_the_loop_saves_into_the_store_and_resumes(
    tmp_path: Path, ranks: Pool, fully_parallel: bool, asynchronous: bool
) -> None:
    """With --ckpt-fully-parallel-save, all replicas write. Otherwise, only the first one writes."""
    files = ["casckpt.json", "common.pt", "metadata.json"]
    found = ranks.run(2, a_loop, tmp_path, fully_parallel, asynchronous)
    assert found == [[files, [], True], [files, [], fully_parallel]]
    store = casckpt.open(tmp_path / "store")
    assert [(one.run, one.step) for one in store.checkpoints()] == [("gpt", 10), ("gpt", 20)]
    alone = own_state(0, Topology())
    alone["optimizer"].pop("flat", None)
    loaded = megatron.load(gpt.emptied(alone), f"{tmp_path}/store#gpt@20")
    assert differences(loaded, gpt.expected(alone)) == []


def resumed(rank: int, size: int, path: Path) -> list[Any]:
    """Resume in a different process, on a different number of ranks, from the store that the folder names."""
    core()
    state = own_state(rank, Topology())
    state["optimizer"].pop("flat", None)
    folder = path / "runs/iter_0000020"
    with megatron.install(path / "another", run="gpt"):
        _, load = strategies_of_the_loop({}, folder, fully_parallel=False)
        found = core().load(theirs(gpt.emptied(state)), str(folder), load)
        metadata = core(".serialization").load_tensors_metadata(str(folder))
        saved_by_the_loop({}, path / "runs/iter_0000030", theirs(state), fully_parallel=False)
    lineage = casckpt.open(path / "another").get("gpt@30").lineage
    return [differences(found, gpt.expected(state)), "layers.norm" in metadata, lineage["resumed_from"]["step"]]


def test_the_loop_loads_from_the_store_named_in_a_folder(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(2, a_loop, tmp_path, True, False)
    assert ranks.run(1, resumed, tmp_path) == [[[], True, 20]]


def methods() -> list[dict[str, Any]]:
    strategies = core(".strategies.torch")
    kinds = (strategies.TorchDistSaveShardedStrategy, strategies.TorchDistLoadShardedStrategy)
    return [dict(vars(kind)) for kind in kinds]


def test_undoing_the_patch_restores_the_original_functions(tmp_path: Path) -> None:
    before = methods()
    installed = megatron.install(tmp_path, run="a")
    assert isinstance(installed, megatron.Installed)
    assert methods() != before
    with pytest.raises(Conflict, match="already saves into a store"):
        megatron.install(tmp_path, run="b")
    installed.undo()
    installed.undo()
    assert methods() == before
    with megatron.install(tmp_path, run="a"):
        assert methods() != before
    assert methods() == before


def test_patches_by_other_code_remain_in_place_and_save_as_before(tmp_path: Path) -> None:
    calls: list[Any] = []
    loop = module("casckpt.frontends.megatron.training_loop")
    kind = core(".strategies.torch").TorchDistSaveShardedStrategy

    def original(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        calls.append(checkpoint_dir)

    def around(self: Any, *arguments: Any) -> None:
        inside(self, *arguments)

    with patch.dict(loop._ORIGINALS, save=original), patch.object(kind, "save", original):
        installed = megatron.install(tmp_path / "store", run="a")
        inside = kind.save
        kind.save = around
        installed.undo()
        assert kind.save is around
        kind("torch_dist", 1).save({}, tmp_path / "iter_0000001")
    assert calls == [tmp_path / "iter_0000001"]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["release", "iter_0000100/modelopt_state", "iter_x", "runs_2"])
def test_the_patched_loop_saves_other_folders_as_before(tmp_path: Path, name: str) -> None:
    calls: list[Any] = []
    loop = module("casckpt.frontends.megatron.training_loop")

    def original(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        calls.append(checkpoint_dir)

    with patch.dict(loop._ORIGINALS, save=original), megatron.install(tmp_path / "store", run="a"):
        core(".strategies.torch").TorchDistSaveShardedStrategy("torch_dist", 1).save({}, str(tmp_path / name))
    assert calls == [str(tmp_path / name)]


def in_folders(rank: int, size: int, path: Path) -> list[Any]:
    core()
    part = megatron.ShardedTensor.from_rank_offsets("w", torch.ones(2))

    def step(folder: Path) -> int | None:
        return int(folder.name.removeprefix("at-")) if folder.name.startswith("at-") else None

    for folders, steps in (
        (("iter_0000005", "non_persistent/iter_0000005"), None),
        (("at-7", "non_persistent/at-7"), step),
    ):
        with megatron.install(path / "store", run="a", step=steps):
            for name in folders:
                saved_by_the_loop({}, path / name, {"w": part}, fully_parallel=False)
    return [json.loads((path / name / "metadata.json").read_text())["sharded_backend"] for name in folders]


def test_ephemeral_checkpoints_have_their_own_run(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(1, in_folders, tmp_path) == [["torch_dist", "torch_dist"]]
    found = {(one.run, one.step) for one in casckpt.open(tmp_path / "store").checkpoints()}
    assert found == {(run, step) for run in ("a", "a-non-persistent") for step in (5, 7)}


def trusting_loads(rank: int, size: int, path: Path, key: Path) -> list[str]:
    """Return the results of loads from folders that spell the store differently, or name a copy or no store."""
    core()
    part = megatron.ShardedTensor.from_rank_offsets("w", torch.ones(2))
    folder, store = path / "iter_0000005", path / "store"
    with megatron.install(store, run="a"):
        saved_by_the_loop({}, folder, {"w": part}, fully_parallel=False)
    casckpt.open(store).copy_to(path / "copy")
    pointer = folder / "casckpt.json"
    told = json.loads(pointer.read_text())
    become = []
    with megatron.install(casckpt.open(store, require_signature=key), run="a"):
        _, load = strategies_of_the_loop({}, folder, fully_parallel=False)
        for url in (str(store), f"{store}/", f"file://{store}", f"{path}/./store", str(path / "copy"), None):
            pointer.write_text(json.dumps({**told, "store": url}))
            if url is None:
                pointer.unlink()
            try:
                core().load({"w": theirs(part)}, str(folder), load)
            except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
                become.append(f"{type(error).__name__}: {error}")
            else:
                become.append("loaded")
    return become


def test_unsigned_checkpoints_are_rejected_from_folders_if_signatures_are_required(tmp_path: Path, ranks: Pool) -> None:
    alice = pair(tmp_path / "keys")
    *pointed, foreign = ranks.run(1, trusting_loads, tmp_path, alice.public)[0]
    assert all("has no valid signature from" in one for one in pointed), pointed
    assert "is not in a store, so it has no signature" in foreign
