"""The saved states, and the files in which all processes record their work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RUNS = ("alpha", "beta/lora")
LONG = "long"  # the run of a single process
CELL = 4096
KEPT = 2  # newest checkpoints of each run, which no gc here forgets


class Wrong(Exception):
    """An invariant does not hold."""


def state(run: str, step: int) -> dict[str, Any]:
    """Return the contents of run@step: constant parts, parts in which few numbers change, new parts, and plain data."""
    made = torch.Generator().manual_seed(sum(run.encode()))
    told = torch.randn(16 * CELL, generator=made).bfloat16()
    told[:: max(1, 997 - step % 7)] += step % 251
    fresh = torch.Generator().manual_seed(1_000_003 * step + len(run))
    return {
        "model": {"kept": torch.randn(32 * CELL // 4, generator=made), "told": told},
        "optim": {"m": torch.randn(80 * CELL // 4, generator=fresh)},
        "step": step,
    }


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two nested states are equal, bit for bit."""
    if one.keys() != other.keys():
        return False
    return all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return same(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@dataclass
class Books:
    """Files of records in a folder of this host. Each record is one line, appended with a single write."""

    folder: Path

    def note(self, book: str, **what: Any) -> None:
        """Add a line."""
        line = f"{json.dumps(what)}\n".encode()
        fd = os.open(self.folder / book, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def lines(self, book: str) -> Iterator[Any]:
        """Return all lines of a file."""
        path = self.folder / book
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # truncated by a kill
                yield json.loads(line)

    def newest(self) -> dict[str, list[int]]:
        """Return the highest saved steps of each run, highest first."""
        found: dict[str, list[int]] = {}
        for one in self.lines("ledger"):
            found[one["run"]] = sorted({one["step"], *found.get(one["run"], ())}, reverse=True)[:KEPT]
        return found
