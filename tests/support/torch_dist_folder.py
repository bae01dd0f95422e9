"""Checkpoints that Megatron-core writes with its strategy ``torch_dist``.

``python -m tests.support.torch_dist_folder`` writes ``tests/data/torch_dist``. With an unpacked wheel of version 0.15.3
in PYTHONPATH it writes ``tests/data/torch_dist_flat``: flat state, which later versions refuse. They are stored as
files because the strategy forks processes and requires a GPU.
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
    """Returns the state without optimizer state, part of which is flat and refused by this version."""
    place = topology.at(rank)
    groups = [{"lr": 0.1, "params": LocalNonpersistentObject([place.tp, place.pp])}]
    return {"model": gpt.state(place)["model"], "args": Namespace(lr=0.1), "groups": groups, "iteration": 7}


def flat_state(rank: int, topology: Topology) -> dict[str, Any]:
    """Flat state of an optimizer, padded like its parameter."""
    return {"flat": gpt.flat(topology.at(rank), "exp_avg_sq", "optimizer.state.exp_avg_sq."), "iteration": 7}


def write(rank: int, meeting: str, flat: bool) -> None:
    """Write one rank's part."""
    topology = SAVED_FLAT if flat else SAVED
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=topology.size)
    with (
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.current_device", lambda: "cpu"),
        patch.object(np, "product", np.prod, create=True),  # which numpy 2 lacks
    ):
        mine = flat_state(rank, topology) if flat else state(rank, topology)
        core().save(theirs(mine), (FLAT_FOLDER if flat else FOLDER).name)  # the name is in the metadata
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
