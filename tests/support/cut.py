"""A DTensor created from a tensor that every rank has in full. Each rank extracts its shard without communication."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

TALKS = "src_data_rank" not in signature(distribute_tensor).parameters
"""Whether torch is older than 2.7: it can split a tensor only to send the parts to other ranks, and lacks strides."""


def cut(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return this rank's shard, as torch splits it."""
    if TALKS:
        whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, placements)
    return distribute_tensor(full, mesh, placements, src_data_rank=None)
