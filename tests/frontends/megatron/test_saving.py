"""Replicas: how ranks divide the writing, and how a save compares replicas."""

from __future__ import annotations

import inspect
import multiprocessing
import re
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import casckpt
from casckpt.frontends import megatron
from casckpt.frontends.megatron import CheckpointingException, ShardedTensor, load, load_plain_tensors, save
from casckpt.frontends.megatron.claims import claims_of
from casckpt.frontends.megatron.saving import Ending, Saving, wait_for_end
from casckpt.saving import rank_part
from casckpt.saving import save as saving
from tests.support import gpt
from tests.support.gpt import Topology, differences
from tests.support.megatron_core import core, own_state, since, theirs, without_cuda
from tests.support.ranks import Pool, outcome_of
from tests.support.scripts import run_script

MIB = 1 << 18  # in elements of float32


def tensor(key: str, data: torch.Tensor, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **more)


def random(key: str, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(len(key)))


def uneven(rank: int) -> dict[str, ShardedTensor]:
    """Return a large tensor and small ones on all ranks, one on two ranks, and one without data on rank 2."""
    state = {"large": tensor("large", random("large", 16 * MIB), replica_id=rank)}
    state |= {f"s{i}": tensor(f"s{i}", random(f"s{i}" * i, 1000 + i), replica_id=(0, rank)) for i in range(20)}
    if rank < 2:
        state["of two"] = tensor("of two", random("of two", 4 * MIB), replica_id=rank)
    some = tensor("empty on 2", random("empty on 2", 4 * MIB), replica_id=rank)
    return state | {"empty on 2": some.without_data() if rank == 2 else some}


def shared(rank: int, size: int, where: str) -> list[Any]:
    """Return the bytes that this rank wrote, and whether a load returns all values."""
    written: list[int] = []

    def write_part(*args: Any, **kwargs: Any) -> Any:
        part = rank_part.write_part(*args, **kwargs)
        written.extend(ref.size for ref in part.share.refs)
        return part

    with patch.object(saving, "write_part", write_part):
        save(uneven(rank), where, fully_parallel=True, check_replicas=True)
    asked = {name: one.without_data() for name, one in uneven(rank).items()}
    found = load(asked, where)
    same = [torch.equal(found[name], one.data) for name, one in uneven(rank).items() if one.data is not None]
    return [sum(written), all(same)]


def test_writes_are_balanced_by_bytes(tmp_path: Path, ranks: Pool) -> None:
    found = ranks.run(4, shared, f"{tmp_path}#a@1")
    total = sum(info.bytes for info in casckpt.open(tmp_path).get("a@1").tensors.values())
    written, same = zip(*found, strict=True)
    assert all(same)
    assert total <= sum(written) < total * 1.01
    assert max(written) - min(written) < 4 << 20, written  # a cell has 1 MiB, and three tensors are split


@pytest.mark.parametrize("options", [{}, {"fully_parallel": True}, {"check_replicas": "raise"}])
def test_replicas_are_used_only_to_share_the_writing_or_for_a_comparison(options: Any) -> None:
    claims = [claims_of([tensor("w", torch.ones(3), replica_id=rank)]) for rank in range(2)]
    assert Saving({}, 0, **options).select(claims) == [[True], [bool(options)]]


def differing(rank: int, size: int, where: str, fully_parallel: bool) -> str:
    data = random("w", 2 * MIB)
    data[-1] += rank
    return repr(outcome_of(lambda: save(state(rank, data), where, fully_parallel=fully_parallel, check_replicas=True)))


def state(rank: int, data: torch.Tensor) -> dict[str, ShardedTensor]:
    """The main replica is on the last rank."""
    return {"w": tensor("w", data, replica_id=2 - rank), "alone": tensor("alone", torch.ones(3), replica_id=rank)}


@pytest.mark.parametrize("fully_parallel", [True, False])
def test_differing_replicas_are_rejected_if_compared(tmp_path: Path, ranks: Pool, fully_parallel: bool) -> None:
    found = ranks.run(3, differing, f"{tmp_path}#a@1", fully_parallel)
    assert all(re.search(r"CheckpointingException.*'w' differs between ranks 0 and [12]", text) for text in found), (
        found
    )
    assert casckpt.open(tmp_path).checkpoints() == []


def compared(rank: int, size: int, where: str) -> None:
    save(state(rank, random("w", 2 * MIB)), where, check_replicas=True)


def test_equal_replicas_are_saved_once(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(3, compared, f"{tmp_path}#a@1")
    assert torch.equal(load_plain_tensors(f"{tmp_path}#a@1")["w"], random("w", 2 * MIB))
    assert casckpt.open(tmp_path).get("a@1").stats.bytes_total == 8 * MIB + 12


def with_a_common_part_of_each_rank(rank: int, size: int, where: str) -> None:
    state = {"w": tensor("w", torch.ones(3), replica_id=rank), "common": torch.full((3,), float(rank))}
    save(state, where, validate_access_integrity=False)


def test_only_rank_0_saves_the_common_part(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(2, with_a_common_part_of_each_rank, f"{tmp_path}#a@1")
    assert torch.equal(casckpt.open(tmp_path).read("a@1")["common"], torch.zeros(3))


REPLICAS = Topology(dp=2)
OURS = ["casckpt.json", "common.pt", "metadata.json"]


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.is_file())


def both_wrapped(rank: int, size: int, path: Path) -> list[Any]:
    wrappers = core(".strategies.fully_parallel")
    save = wrappers.FullyParallelSaveStrategyWrapper(megatron.CasSaveShardedStrategy(path / "store", run="a", step=1))
    load = wrappers.FullyParallelLoadStrategyWrapper(megatron.CasLoadShardedStrategy(), exchange_algo="gather_object")
    state = own_state(rank, REPLICAS)
    core().save(theirs(state), str(path), save)
    with without_cuda():
        found = core().load(theirs(gpt.emptied(state)), str(path), load)
    return [*files(path), *differences(found, gpt.expected(state))]


def test_megatron_core_wrappers_work_with_both_strategies(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, both_wrapped, tmp_path) == [OURS, OURS]


def queued(rank: int, size: int, path: Path, async_strategy: str) -> list[Any]:
    """Run a save that waits for the test. Return the state of Megatron's queue before and after the save."""
    core()
    go_on = threading.Event()
    strategy = megatron.CasSaveShardedStrategy(
        path / "store", run="a", step=1, progress=lambda done, total: go_on.wait()
    )
    state = own_state(rank, REPLICAS)
    named = "async_strategy" in inspect.signature(core().save).parameters
    further = {"async_strategy": async_strategy} if named else {}
    may_fork = patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined] # a worker of tests is a daemon
    with without_cuda(), may_fork, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn about forking a process with threads
        queue = (core if async_strategy == "mcore" else nvrx)(".strategies.async_utils").AsyncCallsQueue()
        request = core().save(theirs(state), str(path), strategy, async_sharded_save=True, **further)
        queue.schedule_async_request(request)
        finalized = [queue.maybe_finalize_async_calls(blocking=False)]
        go_on.set()
        finalized.append(queue.maybe_finalize_async_calls(blocking=True))
    found = core().load(theirs(gpt.emptied(state)), str(path), megatron.CasLoadShardedStrategy())
    return [finalized, files(path), differences(found, gpt.expected(state))]


def nvrx(_: str) -> Any:
    from nvidia_resiliency_ext.checkpointing.async_ckpt import core as queues

    return queues


def test_the_queue_of_megatron_core_does_not_wait_for_a_running_save(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, queued, tmp_path, "mcore") == [[[[], [0]], OURS, []]] * 2


@since("0.17", "the queue of nvidia-resiliency-ext")
def test_the_queue_of_the_resiliency_extension_finishes_saves(tmp_path: Path, ranks: Pool) -> None:
    pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")
    assert ranks.run(2, queued, tmp_path, "nvrx") == [[[[], [0]], OURS, []]] * 2


def test_a_save_is_finished_in_a_different_process(tmp_path: Path) -> None:
    ending = Ending()
    try_it = "import fcntl, sys; fcntl.lockf(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    tried = subprocess.run([sys.executable, "-c", try_it, ending.path], stderr=subprocess.PIPE, text=True, check=False)
    assert "BlockingIOError" in tried.stderr
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from casckpt.frontends.megatron.saving import wait_for_end; wait_for_end(sys.argv[1])"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_script, script, ending.path)
        ending.reached()
    assert waiting.result() == (0, "", "")
    wait_for_end(ending.path)


def verified(rank: int, size: int, path: Path) -> list[Any]:
    core()
    state = own_state(rank, REPLICAS)
    strategy = megatron.CasSaveShardedStrategy(path / "store", run="a", step=1)
    core().save(theirs(state), str(path), strategy, verify_integrity=True)

    def load() -> Any:
        template = theirs(gpt.emptied(state))
        return core().load(template, str(path), megatron.CasLoadShardedStrategy(), verify_integrity=True)

    found = differences(load(), gpt.expected(state))
    dist.barrier()
    if rank == 0:
        (path / "casckpt.json").write_text("{}")
    dist.barrier()
    return [files(path), found, "casckpt.json: hash mismatch" in str(outcome_of(load))]


@since("0.17.1", "verify_integrity")
def test_the_file_check_of_megatron_core_passes(tmp_path: Path, ranks: Pool) -> None:
    names = sorted([*OURS, "integrity.json"])
    assert ranks.run(2, verified, tmp_path) == [[names, [], True]] * 2


def test_a_background_save_stores_the_same_values(tmp_path: Path) -> None:
    data = torch.ones(4)
    request = save({"w": ShardedTensor.from_rank_offsets("w", data)}, f"{tmp_path}#a@1", async_sharded_save=True)
    data.zero_()
    assert isinstance(request, megatron.AsyncRequest)
    called: list[int] = []
    request.add_finalize_fn(lambda: called.append(1))
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(print)
    request.execute_sync()
    assert called == [1]
    assert load_plain_tensors(f"{tmp_path}#a@1")["w"].tolist() == [1] * 4
    failing = save({"w": ShardedTensor.from_rank_offsets("w", data)}, f"{tmp_path}#a@1", async_sharded_save=True)
    assert failing is not None
    with pytest.raises(CheckpointingException, match="already exists"):
        failing.execute_sync()
