"""A checkpoint as Megatron-core itself writes it, with its strategy ``torch_dist``, on two ranks.

``python -m tests.support.torch_dist_folder`` writes ``tests/data/torch_dist`` anew. It is kept as files because that
strategy forks processes of its own, and takes a GPU for granted.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from casckpt.frontends.megatron import LocalNonpersistentObject
from tests.support import gpt
from tests.support.gpt import Topology
from tests.support.megatron_core import core, theirs

FOLDER = Path(__file__).parents[1] / "data/torch_dist"
SIZE = 2


def state(rank: int, topology: Topology) -> dict[str, Any]:
    """Without the state of the optimizer: a part of that is flat, which this version refuses."""
    place = topology.at(rank)
    groups = [{"lr": 0.1, "params": LocalNonpersistentObject([place.tp, place.pp])}]
    return {"model": gpt.state(place)["model"], "args": Namespace(lr=0.1), "groups": groups, "iteration": 7}


def write(rank: int, meeting: str) -> None:
    """One rank's part."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE)
    with patch("torch.cuda.synchronize"), patch("torch.cuda.current_device", lambda: "cpu"):
        core().save(theirs(state(rank, Topology(tp=SIZE))), str(FOLDER))
    dist.destroy_process_group()


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as meeting:
        spawn(write, (f"{meeting}/file",), SIZE)  # type: ignore[no-untyped-call]
