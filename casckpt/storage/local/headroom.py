"""Memory that this process may fill with what it reads: what the host could give, within the limits of its cgroup."""

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
"""Of cgroup v2 and v1: limit, use, and the part of the use that the kernel takes back first, in memory.stat."""


def headroom(meminfo: Path = _MEMINFO, mine: Path = _MINE, groups: Path = _GROUPS) -> int:
    """Bytes that could be had without swapping, or taking what others use; 0 where the system does not say."""
    try:
        available = _number("MemAvailable:", meminfo.read_text()) << 10
        return max(0, min([available, *_left(mine.read_text(), groups)]))
    except (OSError, ValueError):
        return 0


def _left(mine: str, groups: Path) -> Iterator[int]:
    """Yield what each limit of memory leaves: of the own group, and of those around it."""
    for line in mine.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = groups / "memory" if kinds else groups
        inside = root.joinpath(*Path(path).parts[1:])  # not there in a container that sees its group as the root
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
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{name} is not there")
    return int(found[1])
