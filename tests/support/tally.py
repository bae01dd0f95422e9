"""Counts of evidence, recorded where tests produce it. ``tools/evidence`` adds them up.

A line of the file that CASCKPT_TALLY names, by one write: processes that are killed right behind it count, too.
"""

from __future__ import annotations

import os


def tally(what: str, count: int = 1) -> None:
    """Count something, where anybody asks for it."""
    path = os.environ.get("CASCKPT_TALLY")
    if path:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, f"{count} {what}\n".encode())
        finally:
            os.close(fd)
