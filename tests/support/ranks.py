"""Ranks for tests: worker processes that exist as long as the session, with a separate process group for each job.

::

    def total(rank: int, size: int, more: int) -> int: ...  # at the top of a test module: workers import it

    ranks.run(4, total, 1)  # [value of rank 0, ...]; raises JobFailed if any rank failed
    ranks.outcomes(4, total, 1, timeout=2)  # [Outcome, ...]: values, errors, how a process died

Workers are forked from a server that has imported torch, so new ones are cheap. If a process in a job died or hung,
the pool discards all workers of that job. It also discards a worker in which torch has left many threads. Inside a
job, `tell` and `wait_for` let ranks wait for each other without sleeping.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # public, though not in its __all__
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake", which never talks

from casckpt.ranks.ranks import Ranks, everyone
from tests.support.afresh import afresh
from tests.support.torch_versions import skip_if_torch_lacks

Job = Callable[..., Any]
PATIENCE = 200.0  # seconds for a job, also on a busy machine; only jobs under --full take long
_MOST = 20  # threads of a worker; those of each process group that torch does not end wake up 140 times per second
_GRACE = 20.0  # additional seconds for a worker that cannot report its stack


class JobFailed(AssertionError):
    """A rank failed in a job that must succeed."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job on one rank: a value, an error with its traceback, or the death of its process."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    died: int | None = None
    hung: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and not self.text and self.died is None


@dataclass(frozen=True)
class _Request:
    """The message to a worker. ``folder``: where this job's ranks meet. ``tcp``: whether rank 0 hosts the store."""

    rank: int
    size: int
    folder: str
    timeout: float
    tcp: bool
    backend: str
    patience: float
    job: bytes

    @property
    def stacks(self) -> Path:
        """Return the file to which a hanging rank writes its stack."""
        return Path(self.folder, f"hung-{self.rank}")


class _Worker:
    def __init__(self, context: Any) -> None:
        self.pipe, other = context.Pipe()
        output = DupFd(1), DupFd(2)  # belongs to the test process, so that pytest shows it with a failed test
        self.process: BaseProcess = context.Process(target=_serve, args=(other, *output), daemon=True)
        self.process.start()
        other.close()

    def stop(self) -> None:
        """Kill the worker."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """The workers of a session. See the module's docstring."""

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        self._folder = folder
        self._patience = patience
        self._context = afresh()
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop(self._workers)

    def run(
        self,
        size: int,
        job: Job,
        *args: Any,
        timeout: float = 60,
        tcp: bool = False,
        backend: str = "gloo",
        **kwargs: Any,
    ) -> list[Any]:
        """Return the values of ``job(rank, size, *args)``. Raise JobFailed if any rank did not return."""
        outcomes = self.outcomes(size, job, *args, timeout=timeout, tcp=tcp, backend=backend, **kwargs)
        if not all(outcome.ok for outcome in outcomes):
            failed = "\n".join(f"rank {rank}: {_told(outcome)}" for rank, outcome in enumerate(outcomes))
            skip_if_torch_lacks(failed)
            raise JobFailed(failed)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        size: int,
        job: Job,
        *args: Any,
        timeout: float = 60,
        tcp: bool = False,
        backend: str = "gloo",
        patience: float | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Return the outcome on every rank.

        ``timeout``: the timeout of the process group. ``patience``: the timeout of the whole job. Both are in seconds.
        """
        patience = self._patience if patience is None else patience
        while len(self._workers) < size:
            self._workers.append(_Worker(self._context))
        workers = self._workers[:size]
        folder = tempfile.mkdtemp(dir=self._folder)
        packed = pickle.dumps((job, args, kwargs))
        requests = [_Request(rank, size, folder, timeout, tcp, backend, patience, packed) for rank in range(size)]
        for request, worker in zip(requests, workers, strict=True):
            worker.pipe.send(request)
        outcomes = _collect(workers, requests, monotonic() + patience + _GRACE)
        died = any(outcome.died is not None for outcome in outcomes)
        self._stop([worker for worker in workers if died or _threads_of(worker.process.pid) > _MOST])
        return outcomes

    def _stop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.stop()
        self._workers = [worker for worker in self._workers if worker not in workers]


def _collect(workers: Sequence[_Worker], requests: Sequence[_Request], deadline: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(workers):
        pipes = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in outcomes}
        ready = wait(list(pipes), max(deadline - monotonic(), 0))
        for rank in pipes.values():
            if not ready:
                workers[rank].process.kill()
            if not ready or workers[rank].pipe in ready:
                outcomes[rank] = _received(workers[rank], requests[rank])
    return [outcomes[rank] for rank in range(len(workers))]


def _received(worker: _Worker, request: _Request) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the module of an error, if unpickling imports it
            value, error, text = pickle.loads(worker.pipe.recv_bytes())
    except EOFError:
        worker.process.join()
        stacks = request.stacks.read_text() if request.stacks.exists() else ""
        return Outcome(text=stacks or "it died", died=worker.process.exitcode, hung=bool(stacks))
    return Outcome(value, error, text)


def _told(outcome: Outcome) -> str:
    if outcome.died is not None:
        return f"hung at\n{outcome.text}" if outcome.hung else f"died ({outcome.died})"
    return outcome.text or f"returned {outcome.value!r:.200}"


# inside a worker

_meeting: list[Store] = []  # of the running job
_left = [0]  # the number of threads after the last collection


def outcome_of(call: Callable[[], Any]) -> Any:
    """Return the value of a job, or the error that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
        return error


def tell(name: str) -> None:
    """Release the ranks that are in a `wait_for` call with this name in this job."""
    _store().set(name, "")


def wait_for(name: str) -> None:
    """Wait until some rank of this job calls `tell` with ``name``."""
    _store().wait([name], timedelta(seconds=PATIENCE))


def comes_last(name: str, rank: int, size: int, who: int) -> bool:
    """Report that this rank has arrived. The rank ``who`` waits for the others and returns True."""
    if rank != who:
        tell(f"{name} on {rank}")
        return False
    for other in range(size):
        if other != who:
            wait_for(f"{name} on {other}")
    return True


def die() -> None:
    """End this process without a message."""
    os.kill(os.getpid(), signal.SIGKILL)


def _store() -> Store:
    return _meeting[-1]


def _serve(pipe: Connection, *output: Any) -> None:
    for number, file in enumerate(output, start=1):
        os.dup2(file.detach(), number)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "DTensor random operators|TypedStorage is deprecated")  # torch 2.6 itself
    warnings.filterwarnings("ignore", "`product` is deprecated")  # Megatron-core 0.15 itself
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # meshes are on the CPU; torch would shard on any visible GPU
    while True:
        try:
            request: _Request = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_answer(request))


def _answer(request: _Request) -> bytes:
    try:
        with request.stacks.open("w") as stacks:
            faulthandler.dump_traceback_later(request.patience, exit=True, file=stacks)
            value, error, text = _run(request), None, ""
    except BaseException as caught:  # noqa: BLE001 - whatever it is, the test is to see it
        value, error, text = None, caught, traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    try:
        packed = pickle.dumps((value, error, text))
        pickle.loads(packed)
    except Exception as problem:  # noqa: BLE001 - its text must do
        packed = pickle.dumps((None, None, text or f"its value does not pickle: {problem!r}"))
    return packed


def _run(request: _Request) -> Any:
    rank, size = request.rank, request.size
    os.chdir(request.folder)
    own = FileStore(f"{request.folder}/meeting", size)
    _meeting[:] = [FileStore(f"{request.folder}/tests", size)]  # a stopped rank may hold the lock of the other file
    timeout = timedelta(seconds=request.timeout)
    store = _tcp_store(own, rank, size) if request.tcp else PrefixStore("group", own)
    dist.init_process_group(request.backend, store=store, rank=rank, world_size=size, timeout=timeout)
    dist.barrier()  # otherwise, a short job could end while a different rank is still connecting
    try:
        job, args, kwargs = pickle.loads(request.job)
        return job(rank, size, *args, **kwargs)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        _collect_groups()


def _collect_groups() -> None:
    """Delete the groups that only cycles of objects keep. A collection takes longer than most jobs, so leave a few."""
    if _threads_of(os.getpid()) > _left[-1] + 3:
        gc.collect()
        _left[:] = [_threads_of(os.getpid())]


def _threads_of(process: int | None) -> int:
    """Count the threads of a process. On other systems than Linux, return 0."""
    tasks = Path(f"/proc/{process}/task")
    return len([*tasks.iterdir()]) if tasks.exists() else 0


def _forget_meshes() -> None:
    """Clear a torch cache. It keeps meshes that are equal to those of later jobs, but whose groups no longer exist."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    else:  # an older torch; in 2.6, the function is an attribute
        cached: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        getattr(cached, "cache", cached).cache_clear()


def _tcp_store(own: Store, rank: int, size: int) -> Store:
    """Return a store hosted by rank 0, as when rank 0 is started manually. It stops when rank 0 ends."""
    if rank == 0:
        served = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        own.set("port", str(served.port))
        return served
    return TCPStore("127.0.0.1", int(own.get("port")), size, is_master=False)


def total(ranks: Ranks) -> int:
    """Run an exchange that succeeds."""
    return ranks.exchange(lambda: ranks.rank, lambda values: everyone(sum(values), ranks.size))
