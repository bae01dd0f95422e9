"""Saves and loads by any peer, measured and checked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files, values
from benchmarks.measure import Measured, Meter
from benchmarks.peers import peer_class
from benchmarks.peers.base import Part
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    import torch

    from benchmarks.peers.base import Peer, Setting
    from benchmarks.worker import Here


class Skipped(Exception):
    """The case was not measured. The message states the reason."""


Figures = Mapping[str, float] | None


def absent(here: Here, peer: str) -> str | None:
    """Return the reason why a peer cannot be used in this environment, or None if it can."""
    return peer_class(peer).absent()


def offers_frozen(here: Here) -> None:
    """Raise `Skipped` if this version of casckpt does not support frozen keys."""
    import casckpt

    if "``frozen``" not in str(casckpt.Store.save.__doc__):
        raise Skipped("casckpt does not support it yet")


def save(here: Here, peer: str, setting: Setting, state: str, folder: str) -> Measured:
    """Save a state durably."""
    path, content, adapter = _ready(folder), here.states[state], here.peer(peer, setting)
    before = files.stored(path)
    here.settle()
    meter = Meter(here.barrier)
    figures = adapter.save(content, path)
    _make_durable(here, adapter, path)
    return _finished(meter, figures, path, before)


def save_in_background(here: Here, peer: str, setting: Setting, state: str, folder: str) -> Measured:
    """Save while the state changes. Afterward, the state equals the saved one."""
    path, content, adapter = _ready(folder), here.states[state], here.peer(peer, setting)
    before = files.stored(path)
    here.settle()
    meter = Meter()
    wait = adapter.start_save(content, path)
    here.settle()
    meter.mark_blocked()
    values.nudge(content)
    wait()
    _make_durable(here, adapter, path)
    measured = _finished(meter, None, path, before)
    values.nudge(content)
    return measured


def _ready(folder: str) -> Path:
    """Return the checkpoint's folder, which does not exist yet, in an existing parent."""
    path = Path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _make_durable(here: Here, adapter: Peer, path: Path) -> None:
    if adapter.durable:
        return
    here.barrier()
    if here.rank == 0:
        files.make_durable(path)
    here.barrier()


def _finished(meter: Meter, figures: Figures, path: Path, before: int) -> Measured:
    measured = meter.stop()
    measured.stored = files.stored(path) - before
    measured.extra = dict(figures or {})
    return measured


def load(here: Here, *, peer: str, setting: Setting, state: str, folder: str, cache: str = "") -> Measured:
    """Load into touched memory, and compare every byte with ``state``.

    ``cache``: "warm", "cold", or unchanged. With "second use", a load that is not measured follows a cold start.
    """
    wanted, path, adapter = here.states[state], Path(folder), here.peer(peer, setting)
    locals_ = {name: _local(tensor) for name, tensor in wanted.items()}
    memory = _destination(here, state, locals_)
    target = {name: _like(tensor, memory[name]) for name, tensor in wanted.items()}
    measured = _measured_load(here, path, cache, lambda: adapter.load(target, path))
    adapter.hand_over(target)
    _compare(locals_, {name: _local(tensor) for name, tensor in target.items()}, peer, setting)
    return measured


def load_part(here: Here, *, peer: str, setting: Setting, state: str, folder: str, eighth: int, cache: str) -> Measured:
    """Load an eighth of every tensor along its first dimension."""
    wanted, path, adapter = here.states[state], Path(folder), here.peer(peer, setting)
    expected = {name: tensor.chunk(8)[eighth] for name, tensor in wanted.items()}
    memory = _destination(here, f"{state}/{eighth}", expected)
    parts = {
        name: Part(memory[name], tuple(wanted[name].shape), _start(wanted[name], eighth)) for name in expected
    }  # fmt: skip
    measured = _measured_load(here, path, cache, lambda: adapter.load_part(parts, path))
    _compare(expected, memory, peer, setting)
    measured.extra |= {"bytes_wanted": float(values.size_of(memory)), "ranges": float(len(memory))}
    return measured


def _start(tensor: torch.Tensor, eighth: int) -> tuple[int, ...]:
    rows = tensor.chunk(8)[0].shape[0]
    return (eighth * rows, *([0] * (tensor.ndim - 1)))


def _measured_load(here: Here, path: Path, cache: str, run: Callable[[], Figures]) -> Measured:
    here.barrier()
    if here.rank == 0:
        _prepare_cache(here, path, cache)
    if cache == "second use":
        run()
    here.settle()
    meter = Meter(here.barrier)
    figures = run()
    here.settle()
    measured = meter.stop()
    measured.extra = dict(figures or {})
    return measured


def _prepare_cache(here: Here, path: Path, cache: str) -> None:
    if cache == "warm":
        files.bring_into_cache(path)
    elif cache in ("cold", "second use"):
        files.drop_from_cache(path, everything=not here.quick)


def _destination(here: Here, name: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return memory to load into. For all peers, it is touched and does not contain the correct bytes."""
    key = f"into {name}"
    if key not in here.kept:
        here.kept[key] = values.poisoned(like)
    memory: dict[str, torch.Tensor] = here.kept[key]
    values.poison(memory)
    return memory


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.contiguous()


def _like(tensor: Any, memory: torch.Tensor) -> torch.Tensor:
    """Return ``memory``, as a DTensor if ``tensor`` is one."""
    if not hasattr(tensor, "to_local"):
        return memory
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = DTensor.from_local(memory, tensor.device_mesh, tensor.placements, run_check=False)
    return found


def _compare(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], peer: str, setting: Setting) -> None:
    wrong = values.differing(wanted, found)
    if wrong:
        raise WrongBytes(
            f"{peer} {setting or ''} returned wrong bytes in {len(wrong)} tensors, among them {wrong[0]!r}"
        )


def delete(here: Here, folder: str) -> None:
    """Remove a checkpoint, and its parent folder with everything else in it."""
    if here.rank == 0:
        shutil.rmtree(Path(folder).parent, ignore_errors=True)
