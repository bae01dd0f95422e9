"""The checkpoints of folders that Megatron-core removes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import casckpt
from casckpt.errors import NotFound
from casckpt.frontends import megatron
from casckpt.frontends.megatron import folders
from tests.support.logs import logged
from tests.support.megatron_core import core
from tests.support.ranks import Pool


def saved(rank: int, size: int, path: Path, *steps: int, forget_removed: bool = False) -> list[str]:
    """Return the log of the save."""
    core()
    strategy = megatron.CasSaveShardedStrategy(
        path / "store", run="a", forget_removed=forget_removed, metadata={"mine": 1}
    )
    with logged("casckpt.frontends.megatron.folders") as said:
        for step in steps:
            part = megatron.ShardedTensor.from_rank_offsets("w", torch.full((2,), step), (0, rank, size))
            strategy.save({"w": part}, path / f"runs/iter_{step}")
    return said


def steps(path: Path) -> list[int]:
    return [one.step for one in casckpt.open(path / "store").checkpoints()]


def test_checkpoints_of_removed_folders_are_forgotten(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(2, saved, tmp_path, 1, 2, 3, 4)
    store = casckpt.open(tmp_path / "store")
    assert store.get("a@1").metadata == {"mine": 1, "megatron_folder": os.path.realpath(tmp_path / "runs/iter_1")}
    store.save({"w": torch.ones(1)}, run="a", step=9)  # by another program
    store.tag("best", "a@2")
    assert megatron.forget_removed(store, tmp_path / "runs") == []
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / f"runs/iter_{step}")
    found = megatron.forget_removed(tmp_path / "store", f"{tmp_path}/runs/", dry_run=True)
    assert ([one.step for one in found], steps(tmp_path)) == ([1, 3], [1, 2, 3, 4, 9])
    assert megatron.forget_removed(store, tmp_path / "runs", run="b") == []
    assert [one.step for one in megatron.forget_removed(store, tmp_path / "runs")] == [1, 3]
    assert steps(tmp_path) == [2, 4, 9]
    assert store.restore(found[0].id).step == 1


def test_nothing_is_forgotten_if_folders_cannot_be_listed(tmp_path: Path, ranks: Pool) -> None:
    """An empty folder may be an unmounted disk. Folders that name a different store do not count here."""
    ranks.run(1, saved, tmp_path, 1, 2)
    store = casckpt.open(tmp_path / "store")
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    for made in ("", "runs", "runs/iter_1"):
        (tmp_path / made).mkdir(exist_ok=True)
        with pytest.raises(NotFound, match="Check that the disk is mounted"):
            megatron.forget_removed(store, tmp_path / "runs")
    (tmp_path / "runs/iter_1/casckpt.json").write_text('{"store": "another", "run": "a", "step": 1}')
    with pytest.raises(megatron.CheckpointingException, match="Check that the disk is mounted"):
        megatron.forget_removed(store, tmp_path / "runs")
    assert megatron.forget_removed(store, tmp_path / "elsewhere") == []  # the checkpoints belong to a different folder
    assert steps(tmp_path) == [1, 2]


def test_saving_forgets_checkpoints_of_removed_folders(tmp_path: Path, ranks: Pool) -> None:
    """With --save-retain-interval, Megatron removes the previous folder after each save."""
    ranks.run(2, saved, tmp_path, 1, 2, forget_removed=True)
    assert steps(tmp_path) == [1, 2]
    shutil.rmtree(tmp_path / "runs/iter_1")
    ranks.run(2, saved, tmp_path, 3, forget_removed=True)
    assert steps(tmp_path) == [2, 3]
    shutil.rmtree(tmp_path / "runs/iter_2")
    ranks.run(2, saved, tmp_path, 4)
    assert steps(tmp_path) == [2, 3, 4]


def test_a_save_succeeds_even_if_forgetting_fails(tmp_path: Path) -> None:
    with patch.object(folders, "forget_removed", side_effect=NotFound("the disk is gone")):
        said = saved(0, 1, tmp_path, 1, forget_removed=True)
    assert said == ["could not forget the checkpoints of removed folders: the disk is gone"]
    assert steps(tmp_path) == [1]
