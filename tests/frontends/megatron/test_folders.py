"""Folders of Megatron-core that name checkpoints in a store, after saves that fail."""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import casckpt
from casckpt.errors import CasckptError, StorageError
from casckpt.frontends import megatron
from casckpt.store.store import Store
from tests.support.megatron_core import core
from tests.support.ranks import Pool, comes_last, die, outcome_of


class Phase(enum.Enum):
    """An unregistered enum."""

    WARM = 1


def part(rank: int, size: int, value: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Return a state dict with Megatron's own objects."""
    mapping = core(".mapping")
    shard = mapping.ShardedTensor.from_rank_offsets("w", torch.full((2,), value + rank), (0, rank, size))
    return {"w": shard, "iteration": int(value), **changes}


def saved(rank: int, size: int, path: Path, value: float = 0.0, asynchronous: bool = False, **changes: Any) -> None:
    """Save into path / iter_4 and path / store."""
    core()
    strategy = megatron.CasSaveShardedStrategy(path / "store", run="a")
    state = part(rank, size, value, **changes)
    request = core().save(state, str(path / "iter_4"), strategy, async_sharded_save=asynchronous)
    if request is not None:
        request.execute_sync()


def loaded(rank: int, size: int, path: Path, strategy: Any = None) -> dict[str, Any]:
    core()
    found: dict[str, Any] = core().load(
        part(rank, size), str(path / "iter_4"), strategy or megatron.CasLoadShardedStrategy()
    )
    return {**found, "w": found["w"].tolist()}


def said(rank: int, size: int, call: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[str, bool]:
    """Return the message of the call's error, and whether it is an instance of Megatron's and of casckpt's class."""
    error = outcome_of(lambda: call(rank, size, *arguments, **named))
    both = isinstance(error, core(".mapping").CheckpointingException) and isinstance(error, CasckptError)
    return str(error), both


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "iter_4").mkdir()
    return tmp_path


def test_a_save_into_a_folder_also_replaces_its_common_part(path: Path, ranks: Pool) -> None:
    ranks.run(2, saved, path, 1)
    (path / "iter_4/.metadata").touch()  # as if torch_dist had written the folder
    ranks.run(2, saved, path, 5)
    assert ranks.run(2, loaded, path) == [{"w": [5, 5], "iteration": 5}, {"w": [6, 6], "iteration": 5}]
    assert not (path / "iter_4/.metadata").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_an_object_that_one_rank_cannot_save_fails_on_all_ranks(
    path: Path, ranks: Pool, asynchronous: bool, size: int
) -> None:
    ranks.run(2, saved, path, 1)
    assert ranks.run(size, with_a_function, path, asynchronous) == ["rank 1"] * size
    tensors = casckpt.open(path / "store").read("a@4")
    assert tensors["w"].tolist() == [1, 1, 2, 2]


def with_a_function(rank: int, size: int, path: Path, asynchronous: bool) -> str:
    """Only rank 1 has a value that must be pickled, and this rank saves last."""
    comes_last("save", rank, size, 1)
    mapping = core(".mapping")
    value = (lambda: None) if rank == 1 else 7
    objects = {"rng": mapping.ShardedObject("rng", value, (size,), (rank,))}
    text, _ = said(rank, size, saved, path, 5, asynchronous, **objects)
    return "rank 1" if ("rank 1" in text or rank == 1) and "rng" in text else text


def fails_late(rank: int, size: int, path: Path) -> None:
    core()
    strategy = megatron.CasSaveShardedStrategy(path / "store", run="a")
    failed = Future[Any]()
    failed.set_exception(StorageError("the disk is full"))
    common = megatron.ShardedObject("common_state", {"iteration": 5}, (1,), (0,))
    with patch.object(Store, "save_async", return_value=failed):
        request = strategy.async_save({"common_state": common}, path / "iter_4")
    with pytest.raises(StorageError, match="the disk is full"):
        request.execute_sync()


def test_the_error_of_a_background_save_is_raised_at_its_end(path: Path, ranks: Pool) -> None:
    ranks.run(1, fails_late, path)
    assert not list((path / "iter_4").iterdir())


def test_classes_that_other_loads_need_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core()
    strategy = megatron.CasSaveShardedStrategy(tmp_path / "store", run="a")
    common = megatron.ShardedObject("common_state", {"phase": Phase.WARM}, (1,), (0,))
    for step in range(2):
        strategy.save({"common_state": common}, tmp_path / f"iter_{step}")
    assert caplog.text.count(f"common.pt holds {Phase.__module__}.Phase") == 1


def test_a_failed_save_into_a_folder_keeps_the_old_checkpoint(path: Path, ranks: Pool) -> None:
    ranks.run(2, saved, path, 1)
    common = path / "iter_4/common.pt"
    before = common.read_bytes()
    torch.save({"iteration": 5}, common)  # as Megatron-core up to 0.18 would have done by then
    answers = ranks.run(2, said, loaded, path)
    assert all("common.pt is not the file that was saved with a@4" in text for text, _ in answers), answers
    assert all(both for _, both in answers)
    megatron.write_folder(f"{path}/store#a@4", path / "iter_4")
    assert common.read_bytes() == before
    assert ranks.run(2, loaded, path)[0]["iteration"] == 1


def test_two_main_replicas_are_rejected(path: Path, ranks: Pool) -> None:
    first, other = ranks.outcomes(2, twice, path)
    assert first.died
    assert other.value[0].startswith("rank 0")
    assert ranks.run(2, loaded, path) == [{"w": [1, 1], "iteration": 1}, {"w": [2, 2], "iteration": 1}]


def twice(rank: int, size: int, path: Path) -> tuple[str, bool]:
    """Megatron's own check raises only on rank 0, and that process then ends."""
    saved(rank, size, path, 1)
    other = core(".mapping").ShardedTensor.from_rank_offsets("x", torch.ones(2))
    found = said(rank, size, saved, path, 1, other=other)
    if "Invalid access pattern" in found[0]:
        die()
    return found


def test_missing_folders_and_keys_are_reported(path: Path, ranks: Pool) -> None:
    ranks.run(2, saved, path, 1)
    shutil.move(path / "iter_4", path / "iter_5")
    assert "does not exist" in ranks.run(1, said, loaded, path)[0][0]
    shutil.move(path / "iter_5", path / "iter_4")
    shutil.move(path / "store", path / "elsewhere")
    answers = ranks.run(2, said, loaded, path)
    assert all(str(path / "store") in text for text, _ in answers), answers
    assert ranks.run(2, elsewhere, path) == [[1, 1], [2, 2]]
    casckpt.open(path / "elsewhere").forget("a@4")
    assert all("a@4" in text for text, _ in ranks.run(2, said, elsewhere, path))


def elsewhere(rank: int, size: int, path: Path) -> Any:
    core()
    return loaded(rank, size, path, megatron.CasLoadShardedStrategy(path / "elsewhere"))["w"]


def test_a_folder_overwritten_by_torch_dist_loads_as_torch_dist(path: Path, ranks: Pool) -> None:
    ranks.run(2, saved, path, 1)
    (path / "iter_4/.metadata").touch()
    answers = ranks.run(2, said, loaded, path)
    assert all("torch_dist has overwritten" in text and both for text, both in answers), answers


def test_a_folder_is_created_for_an_earlier_save(path: Path, ranks: Pool) -> None:
    megatron.save(part(0, 1, 8, names=("a", {1: "b"})), f"{path}/store#b@6", no_dist=True)
    megatron.write_folder(f"{path}/store#b@latest", path / "iter_4")
    assert json.loads((path / "iter_4/casckpt.json").read_text())["step"] == 6
    assert ranks.run(1, loaded, path) == [{"w": [8, 8], "iteration": 8, "names": ("a", {1: "b"})}]
    assert megatron.maybe_load_config(path / "iter_4") == megatron.CheckpointingConfig("casckpt")
