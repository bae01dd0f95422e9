"""A worker process.

It reads requests as JSON lines and answers each with a JSON line. It runs in any environment that has torch, numpy and
psutil.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.peers.base import Peer


_PR_SET_PDEATHSIG = 1


class WrongBytes(Exception):
    """A checkpoint does not equal the saved state, which makes the benchmark void."""


@dataclass
class Here:
    """The objects of a worker. ``states``: by name. ``peers``: by name and settings, kept for their caches.

    ``quick``: a smoke run, which must not slow down other processes. ``on_gpu``: whether any state is in a GPU's
    memory.
    """

    rank: int
    ranks: int
    rendezvous: str
    quick: bool
    threads: int
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    on_gpu: bool = False

    def peer(self, name: str, setting: dict[str, Any]) -> Peer:
        """Return an adapter. Equal settings return the same adapter."""
        from benchmarks.peers import peer_class

        key = name + json.dumps(setting, sort_keys=True)
        if key not in self.peers:
            self.peers[key] = peer_class(name)(setting, self.threads)
        return self.peers[key]

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.ranks > 1:
            import torch.distributed as dist

            dist.barrier()

    def settle(self) -> None:
        """Wait for work queued on a GPU."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def on_host(self, state: str) -> dict[str, torch.Tensor]:
        """Return a state in host memory: the state itself, or a copy that is created on demand."""
        if not self.on_gpu:
            return self.states[state]
        key = f"{state} on the host"
        if key not in self.kept:
            self.kept[key] = {name: tensor.cpu() for name, tensor in self.states[state].items()}
        copied: dict[str, torch.Tensor] = self.kept[key]
        return copied

    def open_group(self) -> None:
        """Create the process group if there are several ranks."""
        if self.ranks == 1:
            return
        import torch
        import torch.distributed as dist

        torch.set_num_threads(max(1, self.threads // self.ranks))
        where = f"file://{self.rendezvous}"
        dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=self.ranks)

    def close(self) -> None:
        """Finish the background work of adapters."""
        for peer in self.peers.values():
            peer.close()


def main() -> None:
    """Answer requests until the pipe is closed."""
    _die_with_parent()
    about = json.loads(sys.argv[1])
    here = Here(threads=len(os.sched_getaffinity(0)), **about)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of libraries must not be mistaken for a response
    here.open_group()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_answer(here, json.loads(line))).encode() + b"\n")
        answers.flush()
        if here.quick:
            gc.freeze()  # each `Meter` collects garbage, which takes longer for all of torch than a smoke run's saves
    here.close()


def _die_with_parent() -> None:
    """End this process when its parent dies, because a worker in a long call would otherwise not notice."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(here: Here, wanted: dict[str, Any]) -> dict[str, Any]:
    module, _, name = wanted["task"].partition(":")
    try:
        found = getattr(import_module(f"benchmarks.tasks.{module}"), name)(here, **wanted["arguments"])
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is an answer
        traceback.print_exc()
        return {"error": type(error).__name__, "text": _first_line(error)}
    return {"result": asdict(found) if is_dataclass(found) and not isinstance(found, type) else found}


def _first_line(error: Exception) -> str:
    """Return the first line of an error, or the informative line of an error from torch's checkpoints."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line and "Exception ranks" not in line]
    return (told or lines or [""])[-1 if told else 0][:300]


if __name__ == "__main__":
    # under the name that tasks import, so that there is only one WrongBytes
    import_module("benchmarks.worker").main()
