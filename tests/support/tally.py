"""Counts of evidence, recorded by the tests that produce it. ``tools/evidence`` adds them up.

Each count is one line of the file named by CASCKPT_TALLY, and is written with a single write call. Therefore,
processes that die right afterward are also counted.
"""

from __future__ import annotations

import os


def tally(what: str, count: int = 1) -> None:
    """Record a count if CASCKPT_TALLY is set."""
    path = os.environ.get("CASCKPT_TALLY")
    if path:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, f"{count} {what}\n".encode())
        finally:
            os.close(fd)
