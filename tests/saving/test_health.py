"""The health that a save records: NaN, infinities and largest values of changed cells, on all ranks."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import casckpt
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint, TensorHealth
from casckpt.errors import InvalidInput
from casckpt.format.keys import manifest_key
from casckpt.format.records import Health
from casckpt.repository.caches import ManifestCache
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.ranks import Pool
from tests.support.saves import CELL, cells, flip, small, trained
from tests.support.together import line, numbers, spread
from tests.support.worlds import World, reference

NAN, INF = float("nan"), float("inf")


def expected(tensors: Sequence[torch.Tensor]) -> TensorHealth:
    values = torch.cat([torch.empty(0), *(one.reshape(-1).to(torch.float64) for one in tensors)])
    finite = values[values.isfinite()].abs()
    return TensorHealth(int(values.isnan().sum()), int(values.isinf().sum()), float(finite.max()) if len(finite) else 0)


# one save


def state() -> dict[str, torch.Tensor]:
    return {"big": cells(5, 1), "half": trained(3, 2), "count": torch.arange(-7, 3), "mask": torch.tensor([True])}


def wanted(tensors: dict[str, torch.Tensor]) -> dict[str, TensorHealth]:
    return {key: expected([tensor]) for key, tensor in tensors.items() if tensor.dtype != torch.bool}


def test_a_save_counts_nan_and_inf_and_finds_the_largest_number() -> None:
    store, tensors = small(), state()
    whole = store.save(tensors, step=1, health=True)
    assert (whole.healthy, whole.commit.committed.health) == (None, Health(nan=0, inf=0))
    assert whole.health == wanted(tensors)
    tensors["big"][CELL // 4 + 3], tensors["half"][7] = NAN, -INF
    saved = store.save(tensors, step=2, health=True)
    assert (saved.healthy, saved.commit.committed.health) == (False, Health(nan=1, inf=1, keys=["big", "half"]))
    assert saved.health == store.get("default@2").health == wanted(tensors)
    assert store.save(tensors, step=3).health is None


def test_a_save_logs_bad_health_unless_healthy_overrides_it(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    with caplog.at_level(logging.WARNING):
        assert store.save({"w": torch.tensor([NAN])}, step=1, health=True).healthy is False
        assert store.save({"w": torch.tensor([NAN])}, step=2, health=True, healthy=True).healthy is True
        assert store.save({"w": torch.tensor([INF])}, step=3, health=True).healthy is None
    assert [record.message for record in caplog.records] == [
        "default@1 holds NaN (1 elements; in w): it is saved as unhealthy",
        "default@2 holds NaN (1 elements; in w)",
    ]
    with pytest.raises(InvalidInput, match="health=1 is not valid"):
        store.save({}, step=4, health=1)  # type: ignore[arg-type]  # as a slip


def test_frozen_tensors_inherit_their_health_from_the_parent() -> None:
    store, tensors = small(), state()
    store.save(tensors, step=1)
    known = {key: one for key, one in wanted(tensors).items() if key != "big"}
    assert store.save(tensors, step=2, health=True, frozen=["big"]).health == known
    store.save(tensors, step=3, health=True)
    assert store.save(tensors, step=4, health=True, frozen=["big"]).health == wanted(tensors)


@pytest.mark.parametrize("section", ["health", "cells"])
def test_a_damaged_parent_does_not_provide_health(section: str) -> None:
    store, tensors = small(), state()
    saved = store.save(tensors, step=1, health=True)
    found = manifests.get(store.repository, saved.commit).head[section]
    flip(store, manifest_key(saved.commit.txid, saved.commit.id), found.offset + 5)
    for step in (2, 3):
        fresh = Store(Repository(store.repository.storage))
        tensors["count"] = tensors["count"] + 1
        assert fresh.save(tensors, step=step, health=True).health == wanted(tensors)


def test_a_process_that_can_no_longer_read_the_parent_scans_every_cell() -> None:
    store, tensors = small(), state()
    tensors["big"][3] = NAN
    saved = store.save(tensors, step=1, health=True)
    store.repository.storage.delete(manifest_key(saved.commit.txid, saved.commit.id))
    store.repository.manifests = ManifestCache()  # as after reads of other checkpoints
    again = store.save(tensors, step=2, health=True)
    assert (again.healthy, again.health) == (False, wanted(tensors))


def test_a_state_without_numbers_has_no_health() -> None:
    assert small().save({"a": 1, "none": torch.empty(0, 3)}, step=1, health=True).health == {"none": expected([])}


@pytest.mark.parametrize("frozen", [(), ("*",)])
def test_cells_reused_from_a_different_run_are_also_scanned(frozen: Sequence[str]) -> None:
    store, tensors = small(), state()
    tensors["big"][3] = NAN
    store.save(tensors, run="a", step=1)
    saved = store.save(tensors, run="b", step=1, health=True, frozen=frozen)
    assert saved.stats.blobs_written == 0
    assert (saved.healthy, saved.health) == (False, wanted(tensors))


def test_moved_tied_and_thinned_tensors_have_health_under_every_name() -> None:
    store, big = small(), cells(5, 1)
    big[3] = NAN
    store.save({"a": big}, step=1, health=True)
    tensors = {"a": big.flip(0), "b": big, "c": big, "first": big[: CELL // 4], "t": big.view(5, -1).t()}
    saved = store.save(tensors, step=2, health=True)
    assert saved.health == wanted(tensors)
    assert saved.commit.committed.health == Health(nan=5, inf=0, keys=list(tensors))
    store.thin("default@2", drop="b")
    assert store.save(tensors, step=3, health=True).health == wanted(tensors)


def test_an_overwrite_stores_the_health_of_its_own_state() -> None:
    store, tensors = small(), state()
    tensors["big"][3] = NAN
    store.save(tensors, step=1, health=True)
    tensors["big"][3] = 1
    saved = store.save(tensors, step=1, health=True, overwrite=True)
    assert (saved.healthy, saved.health) == (None, wanted(tensors))


def test_equal_bytes_with_a_different_dtype_are_scanned_separately() -> None:
    store, same = small(), cells(2, 1)
    saved = store.save({"a": same, "b": same.view(torch.int32), "c": same.bfloat16().repeat(2)}, step=1, health=True)
    assert saved.health == {
        "a": expected([same]), "b": expected([same.view(torch.int32)]), "c": expected([same.bfloat16()]),
    }  # fmt: skip


@pytest.mark.parametrize("compress", ["auto", "always"])
def test_cells_stored_as_frames_are_also_scanned(compress: Any) -> None:
    store = small()
    for step in range(4):
        tensors = {"w": trained(20, step), "x": cells(3, step)}
        tensors["w"][step] = NAN
        assert store.save(tensors, step=step, health=True, compress=compress).health == wanted(tensors)


def test_a_copy_and_a_thinned_checkpoint_have_the_same_health(tmp_path: Path) -> None:
    store, tensors = small(), state()
    tensors["big"][3] = NAN
    saved = store.save({"optim": tensors}, step=1, health=True)
    store.thin("default@1", drop="optim.half")
    there = casckpt.open(tmp_path)
    store.copy_to(there)
    for one in (store.get(saved.id), there.get(saved.id)):
        assert one.dropped
        assert (one.healthy, one.health) == (False, saved.health)
        assert one.commit.committed.health == saved.commit.committed.health


def test_per_rank_values_count_toward_health() -> None:
    saved = small().save({"w": casckpt.PerRank(torch.tensor([3.0]))}, step=1, health=True)
    assert saved.health == {"w": TensorHealth(0, 0, 3.0)}


# several ranks


def save_shards(rank: int, size: int, path: Path, sick: int | None) -> Any:
    store, full = casckpt.open(path), {"w": numbers("w", 700, 512), "b": numbers("b", 3, 5)}
    found: list[Checkpoint] = []
    for step in range(3):
        full["w"][step] = step
        state = spread(full, line(size), [Shard(0)])
        if rank == sick:
            state["w"].to_local()[0, 0] = NAN
        found.append(store.save({"model": state}, run="a", step=step, health=True))
    return [(one.healthy, one.commit.committed.health, one.health) for one in found]


@pytest.mark.parametrize("sick", [None, 1])
def test_a_nan_on_one_rank_marks_the_checkpoint_on_all_ranks(ranks: Pool, path: Path, sick: int | None) -> None:
    first, *others = ranks.run(2, save_shards, path, sick)
    assert all(one == first for one in others)
    for healthy, told, health in first:
        assert healthy is (None if sick is None else False)
        assert told == Health(nan=sick or 0, inf=0, keys=["model.w"] * (sick or 0))
        assert {key: one.nan for key, one in health.items()} == {"model.w": sick or 0, "model.b": 0}


def save_in(rank: int, size: int, path: Path, world: World, at: tuple[int, int]) -> Any:
    seed, step = at
    return casckpt.open(path).save(world.state(rank, reference(seed, step)), run="a", step=step, health=True).health


@pytest.mark.parametrize("seed", range(4))
def test_health_is_the_same_across_topologies(ranks: Pool, path: Path, seed: int) -> None:
    draw = random.Random(f"health {seed}")
    for step in range(3):
        world = World.drawn(draw)
        found = ranks.run(world.size, save_in, path, world, (seed, step))
        tensors = reference(seed, step)
        want = {key: one for key, one in tensors.items() if one.dtype != torch.bool and key in found[0]}
        assert all(one == {key: in_parts(tensor) for key, tensor in want.items()} for one in found)


def in_parts(tensor: torch.Tensor) -> TensorHealth:
    """Each part of a complex number counts as an element."""
    return expected([torch.view_as_real(tensor) if tensor.is_complex() else tensor])
