"""The storage writer for DCP: save options, and asynchronous saves in a thread or a process."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.storage import memory
from tests.support.afresh import afresh, inherit_fork_server
from tests.support.dcp import failed, forget_plans, load, save
from tests.support.parallel import sharded
from tests.support.ranks import Pool
from tests.support.together import cut, line, numbers
from tests.support.torch_versions import has_torch, needs_torch

try:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
except ImportError:  # before 2.7
    AsyncCheckpointerType = None  # type: ignore[assignment,misc] # of an older torch

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError:
    DefaultStager = StagingOptions = None  # type: ignore[assignment,misc] # of an older torch


STEPS = 10
MEASURED = (2, 7, 8)  # the last step is also measured; counting all tensors takes half a second
SIZE = 1 << 20
UNEVEN = "uneven shards of tensor parallelism and FSDP2"


def state_at(step: int, size: int) -> dict[str, Any]:
    frozen = cut(numbers("frozen", SIZE // 4), line(size), [Shard(0)])
    return {"moving": torch.full((1000,), float(step)), "frozen": frozen, "step": step}


def in_background(rank: int, size: int, path: Path, kind: str, cached: bool, *, spawns: bool) -> list[int]:
    """Change the weights as soon as each save allows it. Return the bytes of all tensors after some steps."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # else it may start none
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # the address where DCP's processes meet
    forget_plans()
    store, counts = casckpt.open(path), []
    state = state_at(0, size)
    before: Any = None
    if kind == "process" and not spawns:
        _fork_processes()
    way: Any = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS} if kind == "process" else {}
    for step in range(STEPS):
        with torch.no_grad():
            state["moving"].fill_(step)
        state["step"] = step
        if before is not None:
            before.result()  # DCP requires that saves run one after the other
            if step - 1 in MEASURED:
                # no save is running here, because other threads must not change tensors during the count
                counts.append(held())
        before = async_save(
            dict(state),
            storage_writer=StorageWriter(store, run=kind, step=step),
            planner=DefaultSavePlanner(enable_plan_caching=True) if cached else DefaultSavePlanner(),
            **way,
        )
        with torch.no_grad():
            state["moving"].fill_(-1)
    before.result()
    counts.append(held())
    if kind == "process":
        _refused_in_memory(rank)
        _end_process()
    forget_plans()
    found = state_at(0, size)
    load(found, StorageReader(store, f"{kind}@{STEPS - 1}"))
    assert found["step"] == STEPS - 1
    return counts


def held() -> int:
    """Return the bytes of all live tensors.

    The process's memory is less exact, because malloc keeps what threads freed.
    """
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _fork_processes() -> None:
    """Let DCP fork its process from one that has imported torch. Each import takes eight seconds of CPU time."""
    executor: Any = import_module("torch.distributed.checkpoint._async_process_executor")

    def process(target: Any, args: Sequence[Any], daemon: bool) -> Any:
        return afresh().Process(target=_as_spawned, args=(target, *args), daemon=daemon)

    inherit_fork_server()
    context = SimpleNamespace(Pipe=afresh().Pipe, Process=process)
    executor.mp = SimpleNamespace(get_context=lambda kind: context)  # DCP uses only these


def _as_spawned(target: Any, *args: Any) -> None:
    """Call a function where casckpt's memory is that of a process that has imported it by itself."""
    memory._HOME = os.urandom(16)
    target(*args)


def _refused_in_memory(rank: int) -> None:
    """DCP's process has its own memory, so a checkpoint in it would disappear with the process."""
    writer = StorageWriter("memory://gone", step=1)
    pending: Any = async_save(
        {"x": torch.ones(3) * rank}, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    told = failed(pending.result)
    assert told
    assert all(kind == "Unsupported" and "memory of another process" in text for kind, text in told.values()), told


def _end_process() -> None:
    """DCP's process runs until the interpreter ends, and its ranks then wait for each other."""
    executor: Any = import_module("torch.distributed.checkpoint._async_process_executor")

    process = executor._CHECKPOINT_PROCESS
    assert process is not None
    executor._CHECKPOINT_PROCESS, executor.mp = None, torch.multiprocessing
    process._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
    process._save_process.join()


@pytest.mark.parametrize(
    ("kind", "cached"),
    [
        ("thread", False),
        pytest.param("thread", True, marks=needs_torch("2.7", "plan caching")),
        pytest.param("process", False, marks=needs_torch("2.8", "how _end_process ends DCP's process")),
    ],
)
def test_each_step_contains_the_state_at_the_time_of_its_save(
    ranks: Pool, store_path: Path, kind: str, cached: bool, full: bool
) -> None:
    """By default, DCP's process is forked. With ``--full``, DCP spawns it, as in a training run."""
    cycles = has_torch("2.7") and not has_torch("2.11")  # of DCP, which keep copies until Python collects garbage
    for counts in ranks.run(2, in_background, store_path, kind, cached, spawns=full):
        # if each step leaked one copy of its half, there would be five copies by then
        assert cycles or min(counts[1:]) - counts[0] < SIZE, counts
    store = casckpt.open(store_path)
    for step in range(STEPS):
        found = store.read(f"{kind}@{step}")
        assert found["step"] == step
        assert found["moving"].unique().tolist() == [step]
        assert torch.equal(found["frozen"], numbers("frozen", SIZE // 4))
        assert step == 0 or store.get(f"{kind}@{step}").stats.bytes_written < 20_000
    assert store.gc(wait=0).waiting == ()


@needs_torch("2.9", "async_stager")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_save_uses_the_stager_that_the_user_passed(store: casckpt.Store) -> None:
    state = {"a": torch.ones(4)}
    future: Any = async_save(state, storage_writer=StorageWriter(store, step=1), async_stager=BlockingAsyncStager())
    future.result()
    assert torch.equal(store.read("default@1")["a"], torch.ones(4))


@needs_torch("2.9", "DefaultStager")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_stager_can_copy_in_the_background(store: casckpt.Store) -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    answer: Any = async_save(
        {"a": torch.ones(4)}, storage_writer=StorageWriter(store), checkpoint_id="last", async_stager=stager
    )
    answer.staging_completion.result()
    answer.upload_completion.result()
    stager.close()
    assert torch.equal(store.read("last@0")["a"], torch.ones(4))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_failure_is_raised_by_the_future(store: casckpt.Store) -> None:
    save = {"a": torch.ones(4)}
    async_save(save, storage_writer=StorageWriter(store, step=1)).result()  # type: ignore[union-attr] # a future
    future: Any = async_save(save, storage_writer=StorageWriter(store, step=1))
    with pytest.raises(BaseException, match="default@1 already exists"):
        future.result()


Store = casckpt.Store


# equal to a save by `Store.save`


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", ["allow_pickel", "owners", "process_group", "no_dist"])
def test_an_unknown_keyword_of_a_writer_is_named(store: Store, name: str) -> None:
    options: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        StorageWriter(store, step=1, **options)


# features


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_writer_accepts_the_options_of_a_save(store: Store) -> None:
    save({"a": torch.ones(2)}, StorageWriter(store, step=1))
    save({"a": torch.zeros(2)}, StorageWriter(store, step=1, overwrite=True, ephemeral=True))
    assert torch.equal(store.read("default@1")["a"], torch.zeros(2))
    assert store.get("default@1").ephemeral
    save({"a": torch.ones(2)}, StorageWriter(store, step=2, lineage=store.get("default@1").child_lineage))
    assert store.get("default@2").lineage["resumed_from"]["step"] == 1
    with pytest.raises(InvalidInput, match="compress"):
        StorageWriter(store, step=1, compress="what")  # type: ignore[arg-type] # that it is refused is the point
    with pytest.raises(InvalidInput, match="threads"):
        StorageReader(store, "a@1", threads=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_repeated_save_writes_only_changed_cells(store: Store) -> None:
    big = {f"backbone.{i}": numbers(f"b{i}", 1 << 18) for i in range(24)}
    head = numbers("head", 1 << 18)
    save(big | {"head": head}, StorageWriter(store, step=1))
    save(big | {"head": head + 1}, StorageWriter(store, step=2))
    assert head.nbytes <= store.get("default@2").stats.bytes_written <= 1.02 * head.nbytes
    save(big | {"head": head + 2}, StorageWriter(store, step=3, frozen=["backbone.*"]))
    assert store.get("default@3").stats.bytes_written <= 1.02 * head.nbytes


# FSDP2 over tensor parallelism, with sizes that do not divide


def strided(rows: int) -> tuple[torch.Tensor, DTensor]:
    """Return a weight and this rank's part of it. Ranks hold different numbers of rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, rows, bias=False))
    whole = model.get_parameter("0.weight").detach().clone()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    part = sharded(model, mesh=mesh["data"]).get_parameter("0.weight").data
    assert isinstance(part, DTensor)
    return whole, part


def uneven(rank: int, size: int, path: Path, rows: int, *, saves: bool) -> None:
    whole, part = strided(rows)
    if saves:
        save({"w": part}, StorageWriter(path, run="a", step=1))
        return
    before = part.to_local().clone()
    part.to_local().zero_()
    load({"w": part}, StorageReader(path, "a@1"))
    assert torch.equal(part.to_local(), before)
    assert torch.equal(part.full_tensor(), whole)


@needs_torch("2.8", UNEVEN)
@pytest.mark.parametrize("rows", [5, 7, 10])
def test_uneven_strided_shards_are_saved(store_path: Path, ranks: Pool, rows: int) -> None:
    ranks.run(4, uneven, store_path, rows, saves=True)
    torch.manual_seed(0)
    assert torch.equal(casckpt.open(store_path).read("a@1")["w"], torch.nn.Linear(3, rows, bias=False).weight)


@needs_torch("2.10", f"a correct full_tensor of {UNEVEN}")
@pytest.mark.parametrize("rows", [5, 7, 10])
def test_uneven_strided_shards_are_loaded(store_path: Path, ranks: Pool, rows: int) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Linear(3, rows, bias=False).weight.detach()
    save({"w": whole}, StorageWriter(store_path, run="a", step=1))
    ranks.run(4, uneven, store_path, rows, saves=False)
