"""The files in which all processes record their work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = 2  # newest checkpoints of each run, which no gc here forgets


class Wrong(Exception):
    """An invariant does not hold."""


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
