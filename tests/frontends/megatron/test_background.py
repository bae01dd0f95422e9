"""Background saves through Megatron-core's wrappers and queues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from casckpt.frontends import megatron
from casckpt.frontends.megatron import (
    CheckpointingException,
    ShardedTensor,
    load_plain_tensors,
    save,
)
from tests.support.ranks import outcome_of

if TYPE_CHECKING:
    from tests.support.ranks import Pool

import inspect
import multiprocessing
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch.distributed as dist

from casckpt.frontends.megatron.background import Ending, wait_for_end
from tests.support import gpt
from tests.support.gpt import Topology, differences
from tests.support.megatron_core import core, own_state, since, theirs, without_cuda

if TYPE_CHECKING:
    from tests.support.ranks import Pool

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


def test_wrappers_of_core_work_around_both_strategies(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, both_wrapped, tmp_path) == [OURS, OURS]


def queued(rank: int, size: int, path: Path, async_strategy: str) -> list[Any]:
    """A save that goes on until it is let go: what Megatron's queue makes of it before, and after."""
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
        warnings.simplefilter("ignore")  # from Python 3.12 on: it forks a process that has threads
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


def test_the_queue_of_core_does_not_wait_for_a_running_save(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, queued, tmp_path, "mcore") == [[[[], [0]], OURS, []]] * 2


@since("0.17", "the queue of nvidia-resiliency-ext")
def test_the_queue_of_the_resiliency_extension_finishes_saves(tmp_path: Path, ranks: Pool) -> None:
    pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")
    assert ranks.run(2, queued, tmp_path, "nvrx") == [[[[], [0]], OURS, []]] * 2


def in_another_process(code: str, path: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, path], stderr=subprocess.PIPE, text=True)


def test_a_save_is_finished_in_another_process() -> None:
    ending = Ending()
    try_it = "import fcntl, sys; fcntl.lockf(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    assert "BlockingIOError" in in_another_process(try_it, ending.path).communicate()[1]
    wait = "import sys; from casckpt.frontends.megatron.background import wait_for_end; wait_for_end(sys.argv[1])"
    waiting = in_another_process(wait, ending.path)
    ending.reached()
    assert waiting.communicate()[1] == ""
    assert waiting.returncode == 0
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
def test_the_file_check_of_core_passes(tmp_path: Path, ranks: Pool) -> None:
    names = sorted([*OURS, "integrity.json"])
    assert ranks.run(2, verified, tmp_path) == [[names, [], True]] * 2


def test_a_save_in_the_background_stores_the_same(tmp_path: Path) -> None:
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
    with pytest.raises(CheckpointingException, match="exists already"):
        failing.execute_sync()
