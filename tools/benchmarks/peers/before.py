"""casckpt from another tree: ``--before TREE``. Its workers also run the benchmark tasks of that tree."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.peers.base import MAPPED, PART, Best
from benchmarks.peers.ours import Casckpt

NAME = "before"


class Before(Casckpt):
    """The earlier tree. The adapter there has the same name as casckpt's adapter here."""

    name = NAME
    environment = NAME
    best: ClassVar[Best] = {**Casckpt.best, MAPPED: (), PART: ({}, {"verify": False})}
