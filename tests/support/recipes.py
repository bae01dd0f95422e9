"""Runs unchanged training programs from docs/examples: starts them, kills them between checkpoints, and restarts them.

Tests observe them from outside, through `torch.Tensor.backward` and `Checkpointer`. The examples contain no code for
tests.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from casckpt.frontends.trainer import Checkpointer
from tests.support.afresh import afresh
from tests.support.scripts import ERR, OUT, PATIENCE, environments, play

Batch = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Start:
    """One start of a training program in ``folder``.

    ``ranks``: how many ranks torchrun starts (0: without torchrun). ``dies_at``: the backward call at which all ranks
    are killed.
    """

    name: str
    folder: str
    ranks: int = 0
    dies_at: int | None = None


@dataclass
class Seen:
    """What was observed on one rank.

    ``losses``: the losses on which backward was called. ``saved``, ``resumed``: contents by step.

    ``status``: the exit status. ``printed``, ``told``: stdout and stderr.
    """

    losses: list[float] = field(default_factory=list)
    saved: dict[int, dict[str, str]] = field(default_factory=dict)
    resumed: dict[int, dict[str, str]] = field(default_factory=dict)
    status: int | None = None
    printed: str = ""
    told: str = ""


@dataclass(frozen=True)
class Training:
    """A program and its folder.

    ``imports``: modules to import once for all starts. ``batch``: the input for models at each save and resume.
    """

    program: Path
    folder: Path
    imports: Sequence[str] = ()
    batch: Batch | None = None


def says_kill_it(program: Path) -> bool:
    """Report whether an example claims that it can be killed."""
    return "\nIf you kill it and restart it" in program.read_text()


def train(training: Training, starts: Sequence[Start]) -> dict[str, list[Seen]]:
    """Run these starts in order. For each start, by name, return what was observed on each rank."""
    here, there = Pipe()
    process = afresh().Process(target=_host, args=(there, training, starts))
    process.start()
    there.close()
    try:
        found: dict[str, list[Seen]] = here.recv()
    finally:
        process.join(PATIENCE)
        process.kill()
    return found


def _host(pipe: Connection, training: Training, starts: Sequence[Start]) -> None:
    torch.set_num_threads(1)
    for name in training.imports:
        import_module(name)
    pipe.send({start.name: _make(training, start) for start in starts})


def _make(training: Training, start: Start) -> list[Seen]:
    home = training.folder / start.folder
    home.mkdir(exist_ok=True)
    processes, pipes, outputs = [], list[Connection](), list[Path]()
    for rank, environment in enumerate(environments(start.ranks)):
        here, there = Pipe()
        outputs.append(training.folder / f"{start.name}-{rank}")
        watch = _Watch(there, outputs[-1].with_suffix(".seen"), start.dies_at, training.batch)
        arguments = (watch, training.program, home, environment, outputs[-1])
        processes.append(multiprocessing.get_context("fork").Process(target=_watched, args=arguments))
        processes[-1].start()
        there.close()
        pipes.append(here)
    ends = [pipe.poll(PATIENCE) and _is_reached(pipe) for pipe in pipes]
    for process, is_there in zip(processes, ends, strict=True):
        if is_there:
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join(PATIENCE)
        process.kill()
        process.join()
    return [_read(output, process.exitcode) for output, process in zip(outputs, processes, strict=True)]


def _is_reached(pipe: Connection) -> bool:
    try:
        pipe.recv()
    except EOFError:  # the process has ended
        return False
    return True


def _read(output: Path, status: int | None) -> Seen:
    path = output.with_suffix(".seen")
    seen: Seen = pickle.loads(path.read_bytes()) if path.exists() else Seen()
    seen.status, seen.printed, seen.told = (
        status, output.with_suffix(OUT).read_text(), output.with_suffix(ERR).read_text()
    )  # fmt: skip
    return seen


def _watched(watch: _Watch, program: Path, home: Path, environment: Mapping[str, str], output: Path) -> None:
    watch.begin()
    try:
        play(program, (), home, environment, output)
    finally:
        watch.write()


class _Watch:
    """The observer inside a training process."""

    def __init__(self, pipe: Connection, path: Path, dies_at: int | None, batch: Batch | None) -> None:
        self._pipe, self._path, self._dies_at, self._batch = pipe, path, dies_at, batch
        self._seen, self._made = Seen(), list[Checkpointer]()

    def begin(self) -> None:
        """Start observing."""
        backward, init, save, resume = (
            torch.Tensor.backward, Checkpointer.__init__, Checkpointer.save_async, Checkpointer.resume,
        )  # fmt: skip

        def watched_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._loss(loss)
            backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call] # torch's own

        def watched_init(it: Checkpointer, *args: Any, **kwargs: Any) -> None:
            init(it, *args, **kwargs)
            self._made.append(it)

        def watched_save(it: Checkpointer, step: int, *args: Any, **kwargs: Any) -> Any:
            if self._batch is not None:
                self._seen.saved[step] = _contents(self._batch(), *args)
            return save(it, step, *args, **kwargs)

        def watched_resume(it: Checkpointer, *args: Any, **kwargs: Any) -> Any:
            found = resume(it, *args, **kwargs)
            if found is not None and self._batch is not None:
                self._seen.resumed[found.step] = _contents(self._batch(), *args, **kwargs)
            return found

        changed: dict[Any, dict[str, Any]] = {
            torch.Tensor: {"backward": watched_backward},
            Checkpointer: {"__init__": watched_init, "save_async": watched_save, "resume": watched_resume},
        }
        for owner, methods in changed.items():
            for name, method in methods.items():
                setattr(owner, name, method)

    def write(self) -> None:
        """Write the observations."""
        self._path.write_bytes(pickle.dumps(self._seen))

    def _loss(self, loss: torch.Tensor) -> None:
        self._seen.losses.append(loss.item())
        if len(self._seen.losses) == self._dies_at:
            for checkpointer in self._made:
                checkpointer.wait()  # so that the number of lost steps does not depend on timing
            self.write()
            self._pipe.send(None)
            signal.pause()


def _contents(
    batch: tuple[torch.Tensor, ...], model: Any, optim: Any = None, train_state: Any = None, **other: Any
) -> dict[str, str]:
    """Return the digests of all tensors, all other values, and each model's output for the batch."""
    parts = {"model": model} if not isinstance(model, Mapping) else dict(model)
    if optim is not None:
        parts["optim"] = optim
    if train_state is not None:
        parts["train"] = {name: value for name, value in train_state.state_dict().items() if name != "rng"}
    found = dict[str, str]()
    for name, part in parts.items():
        found |= dict(_flat(_state(part), name))
        network = getattr(part, "model", part)
        if isinstance(network, nn.Module):
            found[f"{name} evaluated"] = _evaluated(network, batch)
    return found


def _state(part: Any) -> Any:
    if hasattr(part, "state_dict_to_save"):
        return part.state_dict_to_save()
    return part.state_dict() if hasattr(part, "state_dict") else part


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _flat(one, f"{name}.{number}")
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        digest = hashlib.sha256(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        yield name, f"{whole.dtype} {tuple(whole.shape)} {digest}"
    else:
        yield name, repr(value)


def _evaluated(network: nn.Module, batch: tuple[torch.Tensor, ...]) -> str:
    network.eval()
    with torch.no_grad():
        loss = network(*batch).square().mean().item()
    network.train()
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # evaluation leaves parameters unsharded
    return float(loss).hex()
