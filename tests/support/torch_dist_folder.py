"""Checkpoints that Megatron-core writes with its ``torch_dist`` strategy.

``python -m tests.support.torch_dist_folder`` writes ``tests/data/torch_dist``. With an unpacked wheel of version
0.15.3 in PYTHONPATH, it writes ``tests/data/torch_dist_flat``, which has flat state that later versions reject. The
checkpoints are stored as files because the strategy forks processes and requires a GPU.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from casckpt.frontends.megatron import LocalNonpersistentObject
from tests.support import gpt
from tests.support.gpt import Topology
from tests.support.megatron_core import core, theirs

FOLDER = Path(__file__).parents[1] / "data/torch_dist"
FLAT_FOLDER = FOLDER.with_name("torch_dist_flat")
SAVED, SAVED_FLAT = Topology(tp=2), Topology(tp=2, dp=2)


def state(rank: int, topology: Topology) -> dict[str, Any]:
    """Return the state without optimizer state, because part of it is flat, and this version rejects that."""
    place = topology.at(rank)
    groups = [{"lr": 0.1, "params": LocalNonpersistentObject([place.tp, place.pp])}]
    return {"model": gpt.state(place)["model"], "args": Namespace(lr=0.1), "groups": groups, "iteration": 7}


def flat_state(rank: int, topology: Topology) -> dict[str, Any]:
    """Return flat optimizer state, padded like its parameter."""
    return {"flat": gpt.flat(topology.at(rank), "exp_avg_sq", "optimizer.state.exp_avg_sq."), "iteration": 7}


def write(rank: int, meeting: str, flat: bool) -> None:
    """Write the part of one rank."""
    topology = SAVED_FLAT if flat else SAVED
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=topology.size)
    with (
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.current_device", lambda: "cpu"),
        patch.object(np, "product", np.prod, create=True),  # numpy 2 lacks this
    ):
        mine = flat_state(rank, topology) if flat else state(rank, topology)
        core().save(theirs(mine), (FLAT_FOLDER if flat else FOLDER).name)  # the metadata contains the name
    dist.destroy_process_group()


if __name__ == "__main__":
    flat = version("megatron-core").startswith("0.15.")
    folder = FLAT_FOLDER if flat else FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder.parent)
    with tempfile.TemporaryDirectory() as meeting:
        size = (SAVED_FLAT if flat else SAVED).size
        spawn(write, (f"{meeting}/file", flat), size)  # type: ignore[no-untyped-call]  # torch's own
