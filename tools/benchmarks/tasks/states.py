"""States in a worker's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import values

if TYPE_CHECKING:
    import torch

    from benchmarks.worker import Here


def make(
    here: Here, *, name: str, kind: str, size: int, seed: int = 1, shard: int | None = None, device: str = "cpu"
) -> int:
    """Create a state. Return its size over all ranks. ``shard``: each rank has its part along this dimension."""
    state = {key: tensor.to(device) for key, tensor in values.make(kind, size, seed).items()}
    here.on_gpu = here.on_gpu or device != "cpu"
    whole = values.size_of(state)
    here.states[name] = state if shard is None else {k: _sharded(here, v, shard) for k, v in state.items()}
    return whole


def _sharded(here: Here, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if "mesh" not in here.kept:
        here.kept["mesh"] = init_device_mesh("cpu", (here.ranks,))
    local = tensor.chunk(here.ranks, dim)[here.rank].clone()
    found: torch.Tensor = DTensor.from_local(local, here.kept["mesh"], [Shard(dim)], run_check=False)
    return found


def change(here: Here, name: str, prefix: str = "") -> int:
    """Change all bytes of the tensors whose names start with ``prefix``. Return their size."""
    state = here.states[name]
    values.change(state, prefix=prefix)
    return sum(tensor.nbytes for key, tensor in state.items() if key.startswith(prefix))


def tensors(here: Here, name: str) -> int:
    """Return the number of tensors in a state."""
    return len(here.states[name])
