"""casckpt as it was in another tree: ``--before TREE``. Its workers run the benchmark's tasks of that tree, too."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.peers.base import PART, Best
from benchmarks.peers.ours import Casckpt

NAME = "before"


class Before(Casckpt):
    """What this tree is compared with. There its adapter has the name that ours has here."""

    name = NAME
    environment = NAME
    best: ClassVar[Best] = {**Casckpt.best, PART: ({}, {"verify": False})}
