"""Saves on several ranks: each byte is written once, and loads on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import casckpt
from casckpt.errors import CasckptError, RankFailed
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import BLOB, CELL, blob_keys, content, same_state
from tests.support.together import emptied, line, numbers, same_parts, spread, watched


def stored_bytes(path: Path) -> int:
    store = casckpt.open(path)
    return sum(len(content(store, key)) for key in blob_keys(store))


# which rank writes what


def save_replicas(rank: int, size: int, path: Path) -> Any:
    store, storage = watched(path)
    tensors = {f"w{i}": numbers(f"w{i}", 100 + i, 97) for i in range(12)} | {"big": numbers("big", 700, 512)}
    ckpt = store.save({"model": spread(tensors, line(size))}, run="a", step=1)
    assert same_state(store.read("a@1"), {"model": tensors})
    return storage.blob_bytes, ckpt.stats, ckpt.id


def test_replicas_are_stored_once_and_each_rank_writes_its_share(ranks: Pool, path: Path) -> None:
    found = ranks.run(4, save_replicas, path)
    stats = found[0][1]
    written = [nbytes for nbytes, _, _ in found]
    assert sum(written) == stats.bytes_written == stored_bytes(path)
    assert stats.bytes_total <= sum(written) < stats.bytes_total * 1.1
    for nbytes in written:
        assert abs(nbytes - sum(written) / 4) <= BLOB
    assert all(found[0][1:] == one[1:] for one in found)


class Normed(nn.Module):
    """A layer, and statistics of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3000)
        self.norm = nn.BatchNorm1d(3000)


def save_ddp(rank: int, size: int, path: Path, keep_vars: bool) -> Any:
    """The ranks receive different inputs, so their statistics differ. Their parameters are equal."""
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(Normed())
    with torch.no_grad():
        model.module.norm.running_mean.fill_(rank)
        model.module.norm.running_var.copy_(numbers(f"of {rank}", 3000))
    store, storage = watched(path)
    state = model.module.state_dict(keep_vars=keep_vars)
    store.save(state, run="a", step=1)
    return storage.blob_bytes, {key: value.detach() for key, value in state.items()}


@pytest.mark.parametrize("keep_vars", [False, True])
def test_differing_statistics_are_saved_from_one_rank(ranks: Pool, path: Path, keep_vars: bool) -> None:
    found = ranks.run(4, save_ddp, path, keep_vars)
    assert not torch.equal(found[0][1]["norm.running_var"], found[1][1]["norm.running_var"])
    stored = casckpt.open(path).read("a@1")
    assert list(stored) == list(found[0][1])
    assert all(torch.equal(stored[key], found[0][1][key]) for key in stored)
    others = [nbytes for nbytes, _ in found[1:]]
    parameters = 4 * (8 * 3000 + 3 * 3000)
    if keep_vars:  # parameters are replicas, so the ranks share the writes
        assert all(nbytes > parameters / 4 for nbytes in others)
    else:  # detached parameters are plain tensors, so casckpt cannot know that they are equal
        assert others == [0, 0, 0]


def save_some_keys(rank: int, size: int, path: Path) -> Any:
    state: dict[str, Any] = {"everywhere": numbers("e", 50), f"only {rank}": numbers(f"o{rank}", 20 + rank)}
    if rank >= 2:
        state |= {"upper": torch.full((30,), rank), "said": f"by {rank}", "nest": {str(rank): rank, "x": [rank]}}
    store = casckpt.open(path)
    ckpt = store.save(state, run="a", step=1, attachments={"note": str(rank).encode()})
    return ckpt.id, store.read_attachment(ckpt, "note"), store.load(emptied(state), ckpt).unread_keys


def test_keys_that_only_some_ranks_hold_are_saved(ranks: Pool, path: Path) -> None:
    found = ranks.run(4, save_some_keys, path)
    assert len({id for id, _, _ in found}) == 1
    assert {note for _, note, _ in found} == {b"0"}
    state = casckpt.open(path).read("a@1")
    for rank in range(4):
        assert torch.equal(state[f"only {rank}"], numbers(f"o{rank}", 20 + rank))
        assert f"only {(rank + 1) % 4}" in found[rank][2]
    assert torch.equal(state["upper"], torch.full((30,), 2.0))
    assert state["said"] == "by 2"
    assert state["nest"] == {"2": 2, "x": [2], "3": 3}
    assert torch.equal(state["everywhere"], numbers("e", 50))


def save_per_rank(rank: int, size: int, path: Path) -> None:
    value = {"rank": rank, "rng": torch.full((3000 + rank,), rank), "data": bytes([rank]) * (5000 + rank)}
    casckpt.open(path).save({"mine": casckpt.PerRank(value), "step": 3}, run="a", step=1)


def load_per_rank(rank: int, size: int, path: Path) -> Any:
    known = min(rank, 2) if rank < 3 else 0
    template = {
        "mine": casckpt.PerRank({"rank": None, "rng": torch.zeros(3000 + known, dtype=torch.int64), "data": b""})
    }
    casckpt.open(path).load(template, "a@1")
    return template["mine"].value


def test_each_rank_loads_its_own_value_and_new_ranks_load_rank_0s_value(ranks: Pool, path: Path) -> None:
    ranks.run(3, save_per_rank, path)
    for rank, found in enumerate(ranks.run(4, load_per_rank, path)):
        whose = rank if rank < 3 else 0
        assert found["rank"] == whose
        assert torch.equal(found["rng"], torch.full((3000 + whose,), whose))
        assert found["data"] == bytes([whose]) * (5000 + whose)


def save_in_halves(rank: int, size: int, path: Path) -> Any:
    """Two groups save at the same time. Each has its own run and its own mesh."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, mine = rank // 2, rank % 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "inner"))["inner"]
    full = {"w": numbers(f"half {half}", 64, 64)}
    state = {"model": spread(full, mesh, [Shard(0)]), "half": half, "me": casckpt.PerRank(mine)}
    store = casckpt.open(path)
    ckpts = [store.save(state, run=f"half{half}", step=step, process_group=halves[half]) for step in (1, 2)]
    assert ckpts[1].stats.blobs_written == 0
    target = emptied(state) | {"me": casckpt.PerRank(None)}
    store.load(target, f"half{half}@2", process_group=halves[half])
    assert same_parts(target, state)
    assert (target["half"], target["me"].value) == (half, mine)
    both = {f"w{i}": numbers(f"half {i}", 64, 64) for i in range(2)}
    for i in range(2):
        whole = {"model": spread({"w": both[f"w{i}"]}, line(4), [Shard(1)])}
        empty = emptied(whole)
        store.load(empty, f"half{i}@2")
        assert same_parts(empty, whole)
    return ckpts[1].id


def test_groups_save_concurrently_and_all_ranks_load(ranks: Pool, path: Path) -> None:
    ids = ranks.run(4, save_in_halves, path)
    assert ids[0] == ids[1] != ids[2] == ids[3]


FLAT = [(0, 0), (0, 333), (333, 334), (334, 1000)]


def flat_state(rank: int) -> dict[str, Any]:
    whole = numbers("flat", 10, 100)
    lo, hi = FLAT[rank]
    some = [(0, 10), (40, 60)] if rank == 1 else [(10, 40), (60, 1000)] if rank == 3 else []
    flat = whole.reshape(-1)
    chunks = [
        casckpt.Shard(whole[a:b, c:d], (10, 100), offset=(a, c))
        for number, (a, b, c, d) in enumerate([(0, 3, 0, 70), (3, 10, 0, 70), (0, 10, 70, 71), (0, 10, 71, 100)])
        if number % 3 == rank
    ]
    boxed = numbers("boxed", 6, 8)
    return {
        "flat": casckpt.Shard(flat[lo:hi], (10, 100), flat=(lo, hi)),
        "ranges": casckpt.Shard(torch.cat([flat[:0], *(flat[a:b] for a, b in some)]), (10, 100), flat=some),
        "inside": casckpt.Shard(
            boxed[2:4].reshape(-1)[rank * 4 : rank * 4 + 4], (6, 8), (2, 0), (2, 8), (rank * 4, rank * 4 + 4)
        ),
        "chunks": chunks,
    } | ({"rest": 1} if rank == 2 else {})


def save_flat(rank: int, size: int, path: Path) -> Any:
    state = flat_state(rank)
    if not state["chunks"]:
        del state["chunks"]
    if rank == 3:
        boxed = numbers("boxed", 6, 8)
        inside = state.pop("inside")
        around = [casckpt.Shard(boxed[:2], (6, 8), (0, 0)), casckpt.Shard(boxed[4:], (6, 8), (4, 0))]
        state["inside"] = [inside, *around]
    store = casckpt.open(path)
    store.save(state, run="a", step=1)
    empty = emptied(state)
    store.load(empty, "a@1")
    assert same_parts(empty, state)
    return store.save(state, run="a", step=2).stats.blobs_written


def test_flat_shards_uneven_shards_and_several_chunks_are_saved(ranks: Pool, path: Path) -> None:
    assert ranks.run(4, save_flat, path) == [0] * 4
    stored = casckpt.open(path).read("a@2")
    for key, value in stored.items():
        if key != "rest":
            assert torch.equal(value, numbers("boxed", 6, 8) if key == "inside" else numbers("flat", 10, 100)), key


# background saves


def save_behind(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    state = spread({"w": numbers("w", 64, 100, dtype=torch.int32)}, line(size), [Shard(0)])
    futures = []
    for step in range(3):
        futures.append(store.save_async(state, run="a", step=step))
        state["w"].to_local().add_(1)
    front = store.save({"x": torch.full((9,), rank)}, run="b", step=0)
    bad = store.save_async({"x": casckpt.Shard(torch.zeros(1), (5,), flat=(rank, rank + 1))}, run="c", step=0)
    return [future.result().id for future in futures], front.id, outcome_of(bad.result)


def test_background_saves_run_concurrently_with_a_foreground_save(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_behind, path)
    assert all(one[:2] == found[0][:2] for one in found)
    assert all(isinstance(error, CasckptError) for _, _, error in found)
    store = casckpt.open(path)
    for step in range(3):
        assert torch.equal(store.read(f"a@{step}")["w"], numbers("w", 64, 100, dtype=torch.int32) + step)
    assert "c@0" not in store


# loads


def load_bad(rank: int, size: int, path: Path, kind: str) -> Any:
    store = casckpt.open(path)
    full = {"w": numbers("w", 40, 30), "v": numbers("v", 40)}
    store.save(spread(full, line(size), [Shard(0)]), run="a", step=1)
    target: dict[str, Any] = emptied(spread(full, line(size), [Shard(0)]))
    if rank == 1:
        if kind == "key":
            target["missing"] = torch.zeros(3)
        if kind == "shape":
            target["v"] = torch.zeros(41)
        if kind == "dtype":
            target["v"] = torch.zeros(40, dtype=torch.float64)
    ref = "a@7" if kind == "ref" else "a@1"
    error = outcome_of(lambda: store.load(target, ref))
    untouched = all(not one.to_local().any() for one in target.values() if hasattr(one, "to_local"))
    good = emptied(spread(full, line(size)))
    store.load(good, "a@1")
    return error, untouched, same_parts(good, spread(full, line(size)))


@pytest.mark.parametrize("kind", ["key", "shape", "dtype", "ref"])
def test_a_load_that_one_rank_rejects_changes_nothing_on_any_rank(ranks: Pool, path: Path, kind: str) -> None:
    for rank, (error, untouched, good) in enumerate(ranks.run(3, load_bad, path, kind)):
        assert isinstance(error, CasckptError)
        assert not isinstance(error, RankFailed)
        assert untouched
        assert good
        if kind != "ref" and rank != 1:
            assert "rank 1: " in str(error)
            assert error.rank == 1


def load_damaged(rank: int, size: int, path: Path) -> Any:
    """One blob is truncated. Only the rank that needs it notices."""
    store = casckpt.open(path)
    target = emptied(spread({"w": numbers("w", 60, 400)}, line(size), [Shard(0)]))
    return outcome_of(lambda: store.load(target, "a@1"))


def save_one(rank: int, size: int, path: Path) -> None:
    casckpt.open(path).save(spread({"w": numbers("w", 60, 400)}, line(size), [Shard(0)]), run="a", step=1)


def test_damage_found_by_one_rank_is_raised_on_all_ranks(ranks: Pool, path: Path) -> None:
    ranks.run(3, save_one, path)
    store = casckpt.open(path)
    key = blob_keys(store)[0]
    (path / key).chmod(0o600)
    (path / key).write_bytes(content(store, key)[:-CELL])
    errors: Sequence[Any] = ranks.run(3, load_damaged, path)
    assert all(type(error) is type(errors[0]) for error in errors)
    assert all(error.kind == "damaged" and error.key == "w" for error in errors)
    assert len({error.rank for error in errors if error.rank is not None}) == 1
    assert all(one.blob == other.blob for one, other in pairwise(errors))
