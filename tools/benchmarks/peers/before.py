"""casckpt from another tree: ``--before TREE``. Its workers run the benchmark's tasks of that tree, too."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.peers.base import PART, Best
from benchmarks.peers.ours import Casckpt

NAME = "before"


class Before(Casckpt):
    """The earlier tree. Its adapter there has the name of casckpt's adapter here."""

    name = NAME
    environment = NAME
    best: ClassVar[Best] = {**Casckpt.best, PART: ({}, {"verify": False})}
