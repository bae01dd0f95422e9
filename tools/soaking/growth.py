"""The resources that processes use if they are never killed, and whether they grow."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from soaking.books import Books

ROOMS = (("rss", 32 << 20), ("files", 16), ("threads", 4))


def held() -> dict[str, int]:
    """Return the memory, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "files": files, "threads": threads}


def growth(books: Books, began: int) -> tuple[int, list[str]]:
    """Return the number of samples in the run that began at ``began``, and the processes that have grown.

    A process has grown if the median of the last third of its samples exceeds that of the second third. Before its
    first sample, each process has performed all kinds of its work once.
    """
    sampled, grown = 0, []
    for path in books.folder.glob(f"samples.*.{began}"):
        samples = list(books.lines(path.name))
        third = len(samples) // 3
        if third < 5:
            continue
        sampled += len(samples)
        before, after = samples[third : 2 * third], samples[2 * third :]
        for what, room in ROOMS:
            was, now = (statistics.median(one[what] for one in part) for part in (before, after))
            if now > was + room:
                grown.append(f"{path.name}: {what} from {was:.0f} to {now:.0f}")
    return sampled, grown
