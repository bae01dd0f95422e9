"""Determines how much memory this process can still use: the host's available memory, within its cgroup's limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MEMINFO, _MINE, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For cgroup v2 and v1: the limit file, the usage file, and the memory.stat field for memory that is reclaimed
first."""


def headroom(meminfo: Path = _MEMINFO, mine: Path = _MINE, groups: Path = _GROUPS) -> int:
    """Return the number of bytes available without swapping, or 0 if the system does not report it."""
    try:
        available = _number("MemAvailable:", meminfo.read_text()) << 10
        return max(0, min([available, *_left(mine.read_text(), groups)]))
    except (OSError, ValueError):
        return 0


def _left(mine: str, groups: Path) -> Iterator[int]:
    """Yield the bytes remaining under each memory limit of this process's cgroup and its parents."""
    for line in mine.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = groups / "memory" if kinds else groups
        inside = root.joinpath(*Path(path).parts[1:])  # missing if a container sees its group as the root
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(root):
                yield from _left_in(folder)


def _left_in(folder: Path) -> Iterator[int]:
    for limit, use, part in _FILES:
        with suppress(FileNotFoundError):
            most = (folder / limit).read_text().strip()
            if most != "max":
                taken_back = _number(part, (folder / "memory.stat").read_text())
                yield int(most) - int((folder / use).read_text()) + taken_back


def _number(name: str, text: str) -> int:
    match = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"{name} is missing")
    return int(match[1])
