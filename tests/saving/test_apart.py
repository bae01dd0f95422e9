"""Sharded wrappers are cut with their scales if their kind is known, and else stored in the parts that ranks hold."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import casckpt
from casckpt.errors import Mismatch
from casckpt.frontends.training_state import load_model_and_optim_state
from casckpt.tensors.kinds import KINDS
from tests.support.ranks import Pool, die, outcome_of
from tests.support.wrappers import BLOCK, Scaled, bits, make, part_of, rebuild, scaled

SHAPE = (8, 16)


def cut(value: Any) -> dict[str, int]:
    return {"codes": 1, "scale": value.codes.numel() // max(value.scale.numel(), 1), "table": 0}


def register(known: bool) -> None:
    """Register the kind, or not. A worker may have registered it for an earlier job."""
    KINDS.pop("tests:Scaled", None)
    if known:
        casckpt.register_wrapper(Scaled, rebuild=rebuild, cut=cut)


def sharded(seed: int, size: int, *, mesh: Any = None, placements: Any = None) -> Any:
    """Return a DTensor whose local tensor is a wrapper of this rank's rows."""
    mesh = init_device_mesh("cpu", (size,)) if mesh is None else mesh
    coordinate = mesh.get_coordinate()[-1]
    rows = -(-SHAPE[0] // mesh.size(mesh.ndim - 1))
    local = part_of(scaled(seed, *SHAPE), slice(coordinate * rows, (coordinate + 1) * rows))
    placements = placements or [Shard(0)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(SHAPE), stride=(SHAPE[1], 1))


def in_the_background(rank: int, size: int, path: Path, known: bool) -> Any:
    register(known)
    store = casckpt.open(path)
    saved = sharded(1, size)
    expected = bits(saved._local_tensor)
    future = store.save_async({"w": saved, "b": torch.ones(2)}, run="r", step=1)
    saved._local_tensor.codes.zero_()
    future.result()
    template = {"w": sharded(2, size), "b": torch.zeros(2)}
    store.load(template, "r@1")
    return bits(template["w"]._local_tensor) == expected


def loaded(rank: int, size: int, path: Path, known: bool) -> Any:
    register(known)
    template = {"w": sharded(2, size), "b": torch.zeros(2)}
    before = bits(template["w"]._local_tensor)
    error = outcome_of(lambda: casckpt.open(path).load(template, "r@1"))
    changed = bits(template["w"]._local_tensor) != before or bool(template["b"].any())
    if isinstance(error, Exception):
        return f"{type(error).__name__}: {error}" if not changed else "changed"
    return bits(template["w"]._local_tensor) == bits(sharded(1, size)._local_tensor)


@pytest.mark.parametrize("known", [True, False], ids=["cut", "opaque"])
def test_a_wrapper_in_a_dtensor_is_saved_in_the_background_and_resharded_if_it_can_be_cut(
    tmp_path: Path, ranks: Pool, known: bool
) -> None:
    assert ranks.run(2, in_the_background, tmp_path, known) == [True, True]
    assert ranks.run(2, loaded, tmp_path, known) == [True, True]
    keys = casckpt.open(tmp_path).get("r@1").tensors
    if known:
        assert keys["w.codes"].shape == SHAPE
        assert ranks.run(4, loaded, tmp_path, known) == [True] * 4
        whole = {"w": scaled(2, *SHAPE), "b": torch.zeros(2)}
        register(True)
        try:
            casckpt.open(tmp_path).load(whole, "r@1")
            read = casckpt.open(tmp_path).read("r@1")["w"]
        finally:
            register(False)
        assert bits(whole["w"]) == bits(read) == bits(scaled(1, *SHAPE))
    else:
        assert {key for key in keys if key.startswith("w")} == {
            f"w.{first}.{name}" for first in (0, 64) for name in ("codes", "scale", "table")
        }
        for text in ranks.run(4, loaded, tmp_path, known):
            assert text.startswith("Mismatch: 'w' does not fit r@1 (key 'w'): it was saved in 2 parts that cannot be")
        with pytest.raises(Mismatch, match="it was saved in 2 parts that cannot be cut, and has a different"):
            casckpt.open(tmp_path).load({"w": scaled(2, *SHAPE), "b": torch.zeros(2)}, "r@1")


def killed(rank: int, size: int, path: Path) -> None:
    register(False)
    store = casckpt.open(path)
    store.save_async({"w": sharded(1, size), "b": torch.ones(2)}, run="r", step=1).result()
    store.save_async({"w": sharded(3, size), "b": torch.ones(2)}, run="r", step=2)
    die()


def test_a_wrapper_in_a_dtensor_is_resumed_after_its_processes_were_killed(tmp_path: Path, ranks: Pool) -> None:
    assert all(outcome.died for outcome in ranks.outcomes(2, killed, tmp_path))
    assert ranks.run(2, loaded, tmp_path, False) == [True, True]


def replicated(rank: int, size: int, path: Path) -> Any:
    register(False)
    mesh = init_device_mesh("cpu", (2, 2))
    of: Any = {"mesh": mesh, "placements": [Replicate(), Shard(0)]}
    store = casckpt.open(path)
    checkpoint = store.save({"w": sharded(1, size, **of)}, run="r", step=1)
    template = {"w": sharded(2, size, **of)}
    store.load(template, "r@1")
    template["w"]._local_tensor.scale[0] += rank // 2 * 5
    error = outcome_of(lambda: store.save(template, run="r", step=2, check_replicas="raise"))
    return sorted(checkpoint.tensors), str(error)


def test_replicas_of_a_part_are_stored_once_and_compared(tmp_path: Path, ranks: Pool) -> None:
    for keys, error in ranks.run(4, replicated, tmp_path):
        assert keys == sorted(f"w.{first}.{name}" for first in (0, 64) for name in ("codes", "scale", "table"))
        assert "w.0.scale" in error or "w.64.scale" in error


def odd_part(rank: int, size: int, path: Path) -> Any:
    """Rank 0 holds two and a half scales of a vector, and rank 1 the rest."""
    register(True)
    store, whole = casckpt.open(path), scaled(1, 24)
    cuts = [(0, 10), (10, 24)]

    def part(seed: int, lo: int, hi: int) -> casckpt.Shard:
        codes = scaled(seed, 24).codes[lo:hi].clone()
        own = make(codes, torch.full((-(-len(codes) // BLOCK),), float(seed)), whole.table, whole.options, whole.dtype)
        return casckpt.Shard(own, (24,), flat=(lo, hi), replicated=True)

    saved = store.save({"w": part(1, *cuts[rank])}, run="r", step=1)
    template = {"w": part(2, *cuts[rank])}
    store.load(template, "r@1")
    found = bits(template["w"].data) == bits(part(1, *cuts[rank]).data)
    other = {"w": part(2, *((0, 12), (12, 24))[rank])}
    error = outcome_of(lambda: store.load(other, "r@1"))
    return (
        sorted(saved.tensors),
        found,
        str(error),
        bits(other["w"].data) == bits(part(2, *((0, 12), (12, 24))[rank]).data),
    )


def test_a_cut_within_the_elements_of_a_scale_is_stored_in_parts(tmp_path: Path, ranks: Pool) -> None:
    for keys, found, _, unchanged in ranks.run(2, odd_part, tmp_path):
        assert keys == sorted(f"w.{first}.{name}" for first in (0, 10) for name in ("codes", "scale", "table"))
        assert (found, unchanged) == (True, True)


def test_a_part_with_the_same_first_element_but_other_elements_is_refused(tmp_path: Path, ranks: Pool) -> None:
    errors = [error for _, _, error, _ in ranks.run(2, odd_part, tmp_path)]
    assert all("it was saved in 2 parts that cannot be cut, and has a different sharding here" in one for one in errors)


# ranks that differ in kind


def differing(rank: int, size: int, path: Path, background: bool) -> Any:
    """Only rank 1 holds a wrapper, as torchao does if a part has too few elements."""
    register(True)
    mesh = init_device_mesh("cpu", (size,))

    def make(seed: int) -> Any:
        local: Any = torch.full((SHAPE[0] // size, SHAPE[1]), float(rank + seed))
        if rank == 1:
            local = scaled(seed, SHAPE[0] // size, SHAPE[1])
        shape, stride = torch.Size(SHAPE), (SHAPE[1], 1)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def seen(value: Any) -> Any:
        return bits(value._local_tensor) if rank == 1 else value._local_tensor.tolist()

    store, found = casckpt.open(path), []
    for step in (1, 2):
        saved = {"w": make(step), "nested": [make(step + 5)], "b": torch.ones(2)}
        if background:
            future = store.save_async(saved, run="r", step=step)
            (saved["w"]._local_tensor.codes if rank == 1 else saved["w"]._local_tensor).zero_()
            future.result()
        else:
            store.save(saved, run="r", step=step)
        template = {"w": make(9), "nested": [make(9)], "b": torch.zeros(2)}
        store.load(template, f"r@{step}")
        found += [seen(template["w"]) == seen(make(step)), seen(template["nested"][0]) == seen(make(step + 5))]
    return found, sorted(store.get("r@2").tensors)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_ranks_that_hold_a_tensor_as_different_types_store_parts(
    tmp_path: Path, ranks: Pool, size: int, background: bool
) -> None:
    elements = SHAPE[0] * SHAPE[1] // size
    names = ["codes", "scale", "table"]
    parts = [str(elements * rank) for rank in range(size) if rank != 1] + [f"{elements}.{name}" for name in names]
    keys = ["b", *(f"{key}.{part}" for key in ("w", "nested.0") for part in parts)]
    assert ranks.run(size, differing, tmp_path, background) == [([True] * 4, sorted(keys))] * size


# torchao's optimizers


def trained(size: int, kind: str, seed: int, sides: tuple[int, int]) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*sides, bias=False), nn.Linear(sides[1], 8))
    if size > 1:
        fully_shard(model)
    return model, getattr(import_module("torchao.optim"), kind)(model.parameters(), lr=0.01)


def step(model: Any, optimizer: Any, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, model[0].weight.shape[1])).square().mean().backward()
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # torchao would compile for a minute
        optimizer.step()


def everything(model: Any, optimizer: Any) -> Any:
    found = []
    for value in [*model.parameters(), *(one for state in optimizer.state.values() for one in state.values())]:
        local = value._local_tensor if isinstance(value, DTensor) else value
        found.append(bits(local) if hasattr(local, "__tensor_flatten__") else local.tolist())
    return found


def resumed(  # noqa: PLR0917 - a job
    rank: int, size: int, path: Path, kind: str, sides: tuple[int, int], save: bool
) -> Any:
    model, optimizer = trained(size, kind, 1, sides)
    if save:
        for number in range(2):
            step(model, optimizer, number)
        with casckpt.Checkpointer(casckpt.open(path), run="r") as checkpointer:
            checkpointer.save(1, model, optimizer)
    fresh, other = trained(size, kind, 2, sides)
    error = outcome_of(lambda: load_model_and_optim_state(path, "r@1", fresh, other))
    if isinstance(error, Exception):
        return f"{type(error).__name__}: {error}"
    if not save:
        states = [state["exp_avg"] for state in other.state.values()]
        return [type(value._local_tensor if isinstance(value, DTensor) else value).__name__ for value in states]
    for pair in ((model, optimizer), (fresh, other)):
        step(*pair, 5)
    return everything(model, optimizer) == everything(fresh, other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["AdamW8bit", pytest.param("AdamW4bit", marks=pytest.mark.soak), "AdamWFp8"]
)  # tests/frontends/training_state/test_optimizer.py also resumes with each kind
def test_an_optimizer_of_torchao_resumes_on_the_same_and_other_numbers_of_ranks(
    tmp_path: Path, ranks: Pool, kind: str
) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    assert ranks.run(2, resumed, tmp_path, kind, (128, 128), True) == [True, True]
    for size in (1, 4):
        names = ranks.run(size, resumed, tmp_path, kind, (128, 128), False)
        assert [found[0] for found in names] == [f"OptimState{kind.removeprefix('AdamW')}"] * size


@pytest.mark.filterwarnings("ignore")
def test_uneven_parts_of_an_optimizer_of_torchao_are_resumed_on_the_same_ranks(tmp_path: Path, ranks: Pool) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    assert ranks.run(2, resumed, tmp_path, "AdamW8bit", (128, 65), True) == [True, True]
    (text,) = ranks.run(1, resumed, tmp_path, "AdamW8bit", (128, 65), False)
    assert "'optim.state.0.weight.exp_avg' is a tensor here, but a wrapper in the checkpoint" in text
    assert "call dequantize()" in text
