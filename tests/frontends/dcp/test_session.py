"""Saves and loads through torch.distributed.checkpoint on several ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as TorchShard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import DynamicMetaLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import casckpt
from casckpt.frontends.dcp import StorageReader, StorageWriter
from tests.support.dcp import failed, load, save
from tests.support.faulty import fail_before
from tests.support.meshes import build, differing, state_of, whole
from tests.support.ranks import Pool, comes_last, die
from tests.support.together import cut, line, numbers, spread, watched
from tests.support.torch_versions import needs_torch

KINDS = ("ddp", "fsdp2", "hsdp", "tp-fsdp2")


def save_one(rank: int, size: int, path: Path, kind: str) -> Any:
    model, optim = build(kind, size, 1)
    state = state_of(model, optim)
    save(state, StorageWriter(path, run=f"dcp-{kind}", step=1))
    casckpt.open(path).save(state, run=f"native-{kind}", step=1)
    return whole(state)


def load_one(rank: int, size: int, path: Path, ref: str, kind: str) -> Any:
    model, optim = build(kind, size, 7)
    state = state_of(model, optim)
    load(state, StorageReader(path, ref))
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return whole(state_of(model, optim))


def load_native(rank: int, size: int, path: Path, ref: str, kind: str) -> Any:
    state = state_of(*build(kind, size, 7))
    casckpt.open(path).load(state, ref)
    return whole(state)


@needs_torch("2.10", "a correct full_tensor of uneven shards of tensor parallelism and FSDP2")
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("hsdp", "tp-fsdp2"),
        ("tp-fsdp2", "ddp"),
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in (("ddp", "fsdp2"), ("fsdp2", "hsdp"))),
    ],
)
def test_a_checkpoint_loads_on_a_different_mesh_and_natively(
    ranks: Pool, store_path: Path, kind: str, other: str, full: bool
) -> None:
    saved = ranks.run(4, save_one, store_path, kind)[0]
    by_dcp, natively = (f"{how}-{kind}@1" for how in ("dcp", "native"))
    loads = [(4, other, by_dcp), (2, "fsdp2", natively)]
    for size, into, ref in [*loads, (4, other, natively), (2, "fsdp2", by_dcp)] if full else loads:
        for found in ranks.run(size, load_one, store_path, ref, into):
            assert differing(found, saved) == []
    for found in ranks.run(2, load_native, store_path, f"dcp-{kind}@1", "fsdp2"):
        assert differing(found, saved) == []
    assert casckpt.open(store_path).get(f"native-{kind}@1").stats.bytes_written == 0


def save_sick(rank: int, size: int, path: Path) -> Any:
    state = spread({"w": numbers("w", 700, 512), "b": numbers("b", 3, 5)}, line(size), [Shard(0)])
    if rank == 1:
        state["w"].to_local()[0, 0] = float("nan")
    for step, health in enumerate((False, True, True)):
        save(state, StorageWriter(path, run="a", step=step, health=health))
    store = casckpt.open(path)
    return [(one.healthy, {key: found.nan for key, found in (one.health or {}).items()}) for one in store.checkpoints()]


def test_a_nan_on_one_rank_is_detected_even_in_reused_cells(ranks: Pool, store_path: Path) -> None:
    found = ranks.run(2, save_sick, store_path)[0]
    assert found == [(None, {}), *[(False, {"w": 1, "b": 0})] * 2]


# options of get_state_dict and set_state_dict


def with_options(rank: int, size: int, path: Path) -> list[str]:
    options = (
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(ignore_frozen_params=True),
    )
    wrong: list[str] = []
    for step, option in enumerate(options):
        model, optim = build("fsdp2", size, 1)
        kept = whole(state_of(model, optim))
        found, optimizer = get_state_dict(model, optim, options=option)
        save({"model": found, "optim": optimizer}, StorageWriter(path, run="options", step=step))
        model, optim = build("fsdp2", size, 5)
        found, optimizer = get_state_dict(model, optim, options=option)
        state: dict[str, Any] = {"model": found, "optim": optimizer}
        if option.full_state_dict:  # the other ranks receive nothing
            state = casckpt.open(path).read(f"options@{step}")
        else:
            load(state, StorageReader(path, f"options@{step}"))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=option)
        wrong += differing(whole(state_of(model, optim)), kept)
    return wrong


@needs_torch("2.8", "FSDP2 on the CPU")
def test_state_dict_options_are_supported(ranks: Pool, store_path: Path) -> None:
    assert ranks.run(2, with_options, store_path) == [[], []]


# torch's own planner, with missing metadata and with metadata of sharded tensors


def planned_from_the_template(rank: int, size: int, path: Path) -> Any:
    full = numbers("w", 6, 3)
    save({"w": distribute_tensor(full, line(size), [Shard(0)])}, StorageWriter(path, step=1))
    state = {"w": distribute_tensor(torch.zeros(6, 3), line(size), [Shard(1)])}
    load(state, StorageReader(path, "default@1"), planner=DynamicMetaLoadPlanner())
    assert torch.equal(state["w"].full_tensor(), full)
    told: Any = StorageReader(path, "default@1").read_metadata().state_dict_metadata["w"]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in told.chunks]


def test_a_planner_can_build_metadata_from_the_template(ranks: Pool, store_path: Path) -> None:
    assert ranks.run(2, planned_from_the_template, store_path) == [[((0, 0), (6, 3))]] * 2  # one chunk, as documented


def in_memories_of_their_own(rank: int, size: int) -> Any:
    store = casckpt.open("memory://own-dcp")
    store.save({"n": rank}, step=0, no_dist=True)
    state = {"w": distribute_tensor(numbers("w", 6, 3), line(size), [Shard(0)])}
    return failed(lambda: save(state, StorageWriter(store, step=1)))


def test_ranks_with_different_stores_are_rejected(ranks: Pool) -> None:
    for told in ranks.run(2, in_memories_of_their_own):
        assert list(told) == [1]
        assert "all ranks must share one store" in told[1][1]


# replicas, parts of ranks, single processes


def replicas(rank: int, size: int, path: Path) -> None:
    state: dict[str, Any] = {
        "plain": numbers("plain", 64), "n": 3,
        "replicated": distribute_tensor(numbers("r", 64), line(size), [Replicate()]),
        f"only{rank}": numbers(f"only{rank}", 8),
    }  # fmt: skip
    for step, lowest in enumerate((False, True)):
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
        save(state, StorageWriter(path, step=step), planner=planner)
    if rank == 1:
        save({"mine": torch.ones(2)}, StorageWriter(path, run="alone", step=1), no_dist=True)
        assert load({"mine": torch.zeros(2)}, StorageReader(path, "alone@1"), no_dist=True)["mine"].sum() == 2


@needs_torch("2.7", "no_dist")
def test_replicated_states_and_states_of_one_rank_or_process_are_saved(ranks: Pool, store_path: Path) -> None:
    ranks.run(3, replicas, store_path)
    store = casckpt.open(store_path)
    for step in (0, 1):
        found = store.read(f"default@{step}")
        assert set(found) == {"plain", "n", "replicated", "only0", "only1", "only2"}
        assert torch.equal(found["only2"], numbers("only2", 8))
    assert store.get("default@1").stats.bytes_written == 0


def in_groups(rank: int, size: int, path: Path) -> None:
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    group, run = pairs[rank // 2], f"pair{rank // 2}"
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    state: dict[str, Any] = {"a": cut(numbers(run, 6, 2), mesh, [Shard(0)])}
    save(state, StorageWriter(path, run=run, step=1), process_group=group)
    state = {"a": cut(torch.zeros(6, 2), mesh, [Shard(1)])}
    load(state, StorageReader(path, f"{run}@1"), process_group=group)
    assert torch.equal(state["a"].full_tensor(), numbers(run, 6, 2))


@needs_torch("2.8", "DCP saves of groups without rank 0")
def test_different_process_groups_can_save_independently(ranks: Pool, store_path: Path) -> None:
    ranks.run(4, in_groups, store_path)
    assert len(casckpt.open(store_path).checkpoints()) == 2


def without_collectives(rank: int, size: int, path: Path) -> Any:
    full = numbers("a", 7, 3)
    state: dict[str, Any] = {
        "a": distribute_tensor(full, line(size), [Shard(0)]),
        "own": rank,
        "w": numbers(f"w{rank}", 4),
    }
    save(state, StorageWriter(path, run="alone", step=3), use_collectives=False)
    state = {"a": distribute_tensor(torch.zeros(7, 3), line(size), [Shard(0)]), "own": None, "w": torch.zeros(4)}
    load(state, StorageReader(path, "alone@3"))
    assert torch.equal(state["a"].full_tensor(), full)
    assert state["own"] == rank
    assert torch.equal(state["w"], numbers(f"w{rank}", 4))
    other = {"a": distribute_tensor(torch.zeros(7, 3), line(size), [Shard(1)])}
    return failed(lambda: load(other, StorageReader(path, f"alone/rank-{rank}@3")))


@needs_torch("2.9", "use_collectives")
def test_ranks_can_save_without_collectives(ranks: Pool, store_path: Path) -> None:
    for told in ranks.run(3, without_collectives, store_path):
        assert any("Conflict" in kind or "not all that it is to load" in text for kind, text in told.values())
    assert sorted(c.run for c in casckpt.open(store_path).checkpoints()) == [f"alone/rank-{n}" for n in range(3)]


# failures


def fails_on(rank: int, size: int, path: Path, culprit: int) -> Any:
    faults = [fail_before("put", times=99, key="objects/*")] if rank == culprit else []
    store, _ = watched(path, *faults)
    state = {"a": distribute_tensor(numbers("a", 8, 2), line(size), [Shard(0)])}
    comes_last("save", rank, size, culprit)
    told = failed(lambda: save(state, StorageWriter(store, step=1)))
    save(state, StorageWriter(path, step=1))
    return told


@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_a_failed_write_on_one_rank_fails_all_ranks_and_leaves_nothing_behind(
    ranks: Pool, store_path: Path, size: int, culprit: int
) -> None:
    for told in ranks.run(size, fails_on, store_path, culprit):
        assert told[culprit][0] == "StorageError"
    store = casckpt.open(store_path)
    assert [c.step for c in store.checkpoints()] == [1]
    assert store.gc(wait=0).waiting == ()
    assert torch.equal(store.read("default@1")["a"], numbers("a", 8, 2))


class Dying(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        die()


def dies(rank: int, size: int, path: Path) -> None:
    state = {"a": distribute_tensor(numbers("a", 8, 2), line(size), [Shard(0)])}
    save(state, StorageWriter(path, step=1), planner=Dying() if rank == 1 else DefaultSavePlanner())


def test_a_rank_that_dies_leaves_nothing_visible(ranks: Pool, store_path: Path) -> None:
    outcomes = ranks.outcomes(2, dies, store_path, timeout=20)
    assert not any(outcome.ok for outcome in outcomes)
    assert casckpt.open(store_path).checkpoints() == []


# FSDP1


def sharded_optimizer(rank: int, size: int, path: Path) -> None:
    store, full = casckpt.open(path), numbers("exp_avg", 8, 4)
    moments = {"exp_avg": full, "step": torch.tensor(3.0)}
    weight = distribute_tensor(full, line(size), [Shard(0)])
    state = {"model": {"w": weight}, "optimizer": {"state": {"w": moments}, "lr": 0.5}}
    save(state, StorageWriter(store, run="dcp", step=1))
    store.save(state, run="native", step=1)
    for ref in ("dcp@1", "native@1"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's deprecation warnings
            found = load_sharded_optimizer_state_dict({"w": full}, "optimizer", StorageReader(store, ref))
            inner = found["optimizer"]["state"]["w"]
            assert torch.equal(inner["exp_avg"].local_shards()[0].tensor, full[rank * 4 : rank * 4 + 4])
        assert inner["step"] == 3
        assert found["optimizer"]["lr"] == 0.5


def nested_sharded_optimizer(rank: int, size: int, path: Path) -> None:
    store, full = casckpt.open(path), numbers("exp_avg", 8, 4)
    if rank == 0:
        store.save({"optimizer": {"state": {"w": {"exp_avg": full}}}}, step=1, no_dist=True)
    torch.distributed.barrier()
    group: Any = torch.distributed.group.WORLD  # the group for both dimensions: torch accepts only the first ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's deprecation warnings
        outer = init_from_local_shards(
            [TorchShard.from_tensor_and_offsets(torch.zeros(4, 4), [4 * rank, 0], rank)], 8, 4, process_group=group
        )
        inner = _create_chunk_sharded_tensor(torch.zeros(4, 4), rank, 2, 2, group)
        metadata = copy.deepcopy(outer.metadata())
        nested = ShardedTensor._init_from_local_shards_and_global_metadata(
            [TorchShard(inner, copy.deepcopy(outer.local_shards()[0].metadata))],
            sharded_tensor_metadata=metadata, process_group=group, init_rrefs=False,
        )  # fmt: skip
        found = load_sharded_optimizer_state_dict({"w": nested}, "optimizer", StorageReader(store, "default@1"))
    shard = found["optimizer"]["state"]["w"]["exp_avg"].local_shards()[0].tensor
    at = 4 * rank + 2 * rank
    assert torch.equal(shard, full[at : at + 2])


def test_sharded_optimizer_state_is_resharded(ranks: Pool, store_path: Path) -> None:
    ranks.run(2, sharded_optimizer, store_path)


def test_nested_sharded_optimizer_state_is_resharded(ranks: Pool, store_path: Path) -> None:
    ranks.run(2, nested_sharded_optimizer, store_path)
