"""Several ranks save and load together: they share replicas, raise the same errors, and may have parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import casckpt
from casckpt.errors import Mismatch, NotFound
from casckpt.frontends.training_state import (
    load_model_and_optim_state,
    save_model_and_optim_state,
    unshard_model_state,
    unshard_optim_state,
)
from casckpt.frontends.training_state.groups import merged
from tests.support.parallel import (
    Blocks,
    Everything,
    Fsdp1,
    as_it_is,
    build,
    by_gradients,
    everything,
    fsdp2,
    hsdp,
    joined,
    local,
    sharded,
    step,
)
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import BLOB, small_folder
from tests.support.together import watched
from tests.support.training import identical

# values that are equal on several ranks, and values that differ


class Statistics(nn.Module):
    """A large BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x)
        return found


def statistics(rank: int, size: int, path: Path, wrap: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
    model = wrap(Statistics())
    model(torch.randn(3, 8192, generator=torch.Generator().manual_seed(rank)))
    save_model_and_optim_state(path, model, run="a", step=1)
    (mean,) = [buffer for name, buffer in model.named_buffers() if name.endswith("mean")]
    return mean


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        joined,
        sharded,
    ],
    ids=["ddp", "fsdp1", "fsdp2"],
)
def test_batch_norm_statistics_are_stored_once_from_a_single_rank(
    store_path: Path, ranks: Pool, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    small_folder(store_path)  # its cells are smaller than the statistics
    means = ranks.run(3, statistics, store_path, wrap)
    found = unshard_model_state(store_path, "a@1")["norm.running_mean"]
    assert [torch.equal(found, mean) for mean in means] == [True, False, False]


class Wide(nn.Module):
    """A model with enough bytes for several blobs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 512, bias=False)
        self.down = nn.Linear(512, 96, bias=False)
        self.norm = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x))
        return found


def shared_out(rank: int, size: int, path: Path, wrap: Callable[[Any], nn.Module]) -> tuple[int, int, int]:
    torch.manual_seed(1)
    model = wrap(Wide())
    trained = optim.AdamW(model.parameters())
    model(torch.randn(200, 96)).square().sum().backward()
    trained.step()
    store, storage = watched(path)
    done = save_model_and_optim_state(store, model, trained, run="a", step=1)
    again = save_model_and_optim_state(store, model, trained, run="a", step=2)
    assert again.stats is not None
    assert again.stats.bytes_written == 0
    assert done.stats is not None
    return storage.blob_bytes, done.stats.bytes_total, done.stats.bytes_written


@pytest.mark.parametrize(
    "wrap",
    [DistributedDataParallel, hsdp, Fsdp1("HYBRID_SHARD"), Fsdp1("NO_SHARD"), Fsdp1(), fsdp2],
    ids=["ddp", "hsdp", "fsdp1 HYBRID_SHARD", "fsdp1 NO_SHARD", "fsdp1", "fsdp2"],
)
def test_replicas_are_written_once_and_their_holders_share_the_work(
    store_path: Path, ranks: Pool, wrap: Callable[[Any], nn.Module]
) -> None:
    small_folder(store_path)
    found = ranks.run(4, shared_out, store_path, wrap)
    whole = 3 * 2 * 96 * 512 * 4
    for written, total, stored in found:
        assert whole <= total < whole + 100  # the counts of two steps
        assert whole < stored < 1.1 * whole
        assert abs(written - stored / 4) <= BLOB


# an error on one rank is raised on all


def kinds(error: Any) -> tuple[str, str]:
    return type(error).__name__, str(error)


def refused_loads(rank: int, size: int, path: Path) -> Any:
    model, trained = build("fsdp2 on 2", 1)
    step(model, trained, range(1))
    save_model_and_optim_state(path, model, trained, run="a", step=1)
    fresh, other = build("fsdp2 on 2", 2, shape_seed=1)
    before = everything(fresh, other)

    def load(ref: str = "a@1", change: Callable[[nn.Module], Any] = lambda model: None) -> Any:
        target, optimizer = build("fsdp2 on 2", 2, shape_seed=1)
        change(target)
        outcome = outcome_of(lambda: load_model_and_optim_state(path, ref, target, optimizer))
        assert everything(target, optimizer).differences(before) in ([], ["model.more"])
        return kinds(outcome)

    def more_on_rank_1(target: nn.Module) -> None:
        if rank == 1:
            target.register_buffer("more", torch.zeros(2))

    def wider_on_rank_1(target: nn.Module) -> None:
        if rank == 1:
            target.register_buffer("counts", torch.zeros(99, dtype=torch.int64))
            before.model["counts"] = torch.zeros(99, dtype=torch.int64)

    def less(target: nn.Module) -> None:
        del target.counts
        before.model.pop("counts")

    return [load("b@1"), load(change=more_on_rank_1), load(change=wider_on_rank_1), load(change=less)]


def test_all_ranks_reject_a_load_that_one_rank_rejects(store_path: Path, ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(2, refused_loads, store_path)):
        assert [kind for kind, _ in found] == ["NotFound", "MissingKey", "Mismatch", "Mismatch"]
        assert ["rank 1: " in text for _, text in found] == [False, rank == 0, rank == 0, False]
        assert all(word in text for word, (_, text) in zip(["b", "more", "counts", "counts"], found, strict=True))


def missing_state(rank: int, size: int, path: Path) -> Any:
    model, _ = build("fsdp2 on 2", 1)
    parameters = list(model.parameters())
    save_model_and_optim_state(path, model, optim.SGD(parameters[:-1]), run="less", step=1)
    save_model_and_optim_state(path, model, optim.SGD(parameters), run="more", step=1)
    save_model_and_optim_state(path, model, run="none", step=1)

    def load(ref: str, mine: list[Any], **flags: Any) -> Any:
        return outcome_of(lambda: load_model_and_optim_state(path, ref, model, optim.SGD(mine), **flags))

    errors = [load("less@1", parameters), load("more@1", parameters[:-1]), load("none@1", parameters)]
    done = [
        load(ref, mine, strict=False).missing_keys
        for ref, mine in (("less@1", parameters), ("more@1", parameters[:-1]), ("none@1", parameters))
    ]
    return [kinds(error) for error in errors], done


def test_an_optimizer_with_different_parameters_is_rejected(store_path: Path, ranks: Pool) -> None:
    for errors, done in ranks.run(2, missing_state, store_path):
        assert [kind for kind, _ in errors] == ["MissingKey", "Mismatch", "MissingKey"]
        assert all("tied.0.weight" in text for _, text in errors[:2])
        assert done == [("optim.state.tied.0.weight",), (), ("optim.param_groups",)]


def refused_saves(rank: int, size: int, path: Path) -> Any:
    def save(model: nn.Module, *groups: Any, kind: Callable[..., Optimizer] = optim.SGD) -> Any:
        return kinds(outcome_of(lambda: save_model_and_optim_state(path, model, kind(*groups), run="a", step=1)))

    model, _ = build("ddp", 1)
    foreign = [nn.Parameter(torch.zeros(7))] if rank == 2 else []
    one = joined(nn.Linear(3, 3), use_orig_params=False)
    flat, _ = build("fsdp1 on 3", 1)
    with FullyShardedDataParallel.summon_full_params(flat):
        inside = save(flat, flat.parameters())
    return [save(model, [*model.parameters(), *foreign]), save(one, one.parameters()), inside]


def test_all_ranks_reject_a_save_that_one_rank_rejects(store_path: Path, ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(3, refused_saves, store_path)):
        assert [kind for kind, _ in found] == ["InvalidInput"] * 3
        words = [r"[7]", "use_orig_params=True", "summon_full_params"]
        assert all(word in text for word, (_, text) in zip(words, found, strict=True)), found
        assert ("rank 2: " in found[0][1]) is (rank != 2)
    with pytest.raises(NotFound):
        casckpt.open(store_path).get("a@1")


def of_two_kinds(rank: int, size: int, path: Path) -> Any:
    """Save with a different kind of optimizer on each rank, first for the whole model, then for a part of it on each
    rank."""
    torch.manual_seed(1)
    model, kind = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), (optim.AdamW, optim.SGD)[rank]
    whole = kinds(
        outcome_of(lambda: save_model_and_optim_state(path, model, kind(model.parameters()), run="a", step=1))
    )
    state = {"model": model, "own": kind(model.parameters())}
    objects = kinds(outcome_of(lambda: casckpt.open(path).save(state, run="a", step=1)))
    save_model_and_optim_state(path, model, kind(model[rank].parameters()), run="a", step=2)
    return whole, objects


def test_different_optimizers_under_one_key_are_rejected(store_path: Path, ranks: Pool) -> None:
    small_folder(store_path)
    for found in ranks.run(2, of_two_kinds, store_path):
        for key, (kind, text) in zip(("optim", "own"), found, strict=True):
            assert kind == "InvalidInput"
            assert f"'{key}' is a different kind of optimizer on rank 1 than on rank 0: for '0.weight' it has " in text
            assert text.index("'dampening'") < text.index(" there, but ") < text.index("'betas'")
    groups = casckpt.open(store_path).read("a@2")["optim"]["param_groups"]
    assert [("betas" in group, group["params"]) for group in groups] == [
        (True, ["0.weight", "0.bias"]), (False, ["1.weight", "1.bias"]),
    ]  # fmt: skip


# without a model


def unsharded(rank: int, size: int, path: Path) -> Any:
    model, trained = build("fsdp2 on 2", 1)
    step(model, trained, range(1))
    save_model_and_optim_state(path, model, trained, run="a", step=1)
    wanted = everything(model, trained)
    store, storage = watched(path)
    tensors, optimizer = unshard_model_state(store, "latest"), unshard_optim_state(store, "latest", by_name=True)
    reads = storage.reads()
    groups = [dict(sorted(group.items())) for group in optimizer["param_groups"]]
    assert Everything(tensors, optimizer["state"], groups).differences(wanted) == []
    only = [unshard_model_state(store, "a@1", rank0_only=True), unshard_optim_state(store, "a@1", rank0_only=True)]
    assert [bool(one) for one in only] == [rank == 0] * 2
    assert bool(unshard_model_state(store, "a@1", no_dist=True))
    return reads, kinds(outcome_of(lambda: unshard_model_state(store, "b@1", rank0_only=True)))


def test_unshard_works_on_several_ranks(store_path: Path, ranks: Pool) -> None:
    for rank, (reads, (kind, _)) in enumerate(ranks.run(2, unsharded, store_path)):
        assert kind == "NotFound"
        # rank 0 reads the manifest and sends it
        assert len([key for key in reads if "manifest" in key]) == (rank == 0), reads


def alone(rank: int, size: int, path: Path) -> Any:
    model, trained = build("plain", 1)
    step(model, trained, range(1))
    if rank == 0:  # rank 0 must not wait for the others
        save_model_and_optim_state(path, model, trained, run="a", step=1, no_dist=True)
        fresh, other = build("plain", 2, shape_seed=1)
        load_model_and_optim_state(path, "a@1", fresh, other, no_dist=True)
        assert identical([*fresh.parameters()], [*model.parameters()])
        return [bool(read(path, "a@1", rank0_only=True, no_dist=True)) for read in READERS]
    return [kinds(outcome_of(partial(read, path, "a@1", rank0_only=True, no_dist=True))) for read in READERS]


READERS: list[Callable[..., Any]] = [unshard_model_state, unshard_optim_state]


def test_rank_0_can_save_load_and_unshard_alone(store_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, alone, store_path)
    assert first == [True, True]
    assert [kind for kind, _ in second] == ["InvalidInput"] * 2
    assert all("rank 1" in text for _, text in second)


# ranks with different parameters


def stages(rank: int, size: int, path: Path) -> None:
    """Save two pipeline stages together. Each is sharded across two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = mesh.get_local_rank("stage")

    def make(seed: int) -> tuple[nn.Module, Optimizer]:
        model = nn.ModuleDict({f"stage{stage}": sharded(Blocks(seed + stage, as_it_is), mesh=mesh["data"])})
        parameters = list(model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:2], "weight_decay": 0.5}, {"params": parameters[2:]}]
        return model, optim.AdamW(groups, lr=0.1 + stage)

    model, trained = make(1)
    by_gradients(model, trained, range(2))
    save_model_and_optim_state(path, model, trained, run="a", step=1)
    fresh, other = make(5)
    for group in other.param_groups:
        group["lr"] = 7.0
    load_model_and_optim_state(path, "a@1", fresh, other)
    assert [group["lr"] for group in other.param_groups] == [0.1 + stage] * 2
    by_gradients(model, trained, range(2, 4))
    by_gradients(fresh, other, range(2, 4))
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert identical(local(one), local(two))
    refused = outcome_of(lambda: load_model_and_optim_state(path, "a@1", fresh, process_group=mesh["data"].get_group()))
    assert isinstance(refused, Mismatch)  # these two ranks have only one of the stages


def test_pipeline_stages_are_unsharded(store_path: Path, ranks: Pool) -> None:
    ranks.run(4, stages, store_path)
    groups = unshard_optim_state(store_path, "a@1", by_name=True)["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (0.1, 0.5),
        (0.1, 0.01),
        (1.1, 0.5),
        (1.1, 0.01),
    ]
    assert sum(len(group["params"]) for group in groups) == 8


def test_unshard_merges_the_parameter_groups_of_several_ranks() -> None:
    def group(names: str, **options: Any) -> dict[str, Any]:
        return {"lr": torch.tensor(0.5), "betas": [{"x": 1.0}], **options, "params": names.split()}

    def seen(groups: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        return [(" ".join(one["params"]), one.get("decay")) for one in groups]

    same = [group("a b"), group("c", decay=1)]
    assert seen(merged([same, same])) == [("a b", None), ("c", 1)]
    more = [group("d"), group("e c", decay=1)]
    assert seen(merged([same, more])) == [("a b d", None), ("c e", 1)]
    assert seen(merged([same, [group("d", decay=2), group("a", decay=3)]])) == [("a b", None), ("c", 1), ("d", 2)]
    assert seen(merged([[], [group("")], same])) == [("a b", None), ("c", 1)]
    named = merged([[group("a", param_names=["A"])], [group("b a", param_names=["B", "A"])]])
    assert [one["param_names"] for one in named] == [["A", "B"]]


def group_of_two(rank: int, size: int, path: Path) -> None:
    """Save and load in a process group of some ranks, while the others do something else."""
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        model = DistributedDataParallel(Blocks(1, as_it_is), process_group=pair)
        trained = optim.AdamW(model.parameters())
        step(model, trained, range(1))
        save_model_and_optim_state(path, model, trained, run="a", step=1, process_group=pair)
        fresh = Blocks(2, as_it_is)
        load_model_and_optim_state(path, "a@1", fresh, optim.AdamW(fresh.parameters()), process_group=pair)
        assert identical([*fresh.parameters()], [*model.parameters()])


def test_unshard_works_in_a_process_group_of_some_ranks(store_path: Path, ranks: Pool) -> None:
    ranks.run(4, group_of_two, store_path)
