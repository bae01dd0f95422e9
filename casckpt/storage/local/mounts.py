"""Mounts: whether listings of a folder show what other hosts wrote, and what its page cache costs."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_SURE = {"noac", "actimeo=0", "acdirmax=0"}
_LARGE_FOLIOS = {"ext4": (6, 16)}
"""The kernel from which a file system fills its cache in large pieces, at a fraction of the processor time."""


def stale_listings(path: Path, mounts: Path = _MOUNTS) -> str:
    """Return why listings of ``path`` may lag behind, and what to do; "" where they do not, or nothing is known."""
    kind, options = _mount_of(path, mounts)
    if not re.fullmatch(r"nfs\d?", kind) or _SURE & set(options.split(",")):
        return ""
    return (
        f"{path} is on NFS, mounted with attribute caching, so that a listing may miss what another host has just "
        "written. Mount it with noac (or actimeo=0), or run this on the file server"
    )


def caches_well(path: Path, mounts: Path = _MOUNTS, release: str | None = None) -> bool:
    """Tell whether files of ``path`` are known to be read through the page cache no slower than around it."""
    kind, options = _mount_of(path, mounts)
    kernel = re.match(r"(\d+)\.(\d+)", platform.release() if release is None else release)
    if kind not in _LARGE_FOLIOS or kernel is None or "data=journal" in options.split(","):
        return False
    return (int(kernel[1]), int(kernel[2])) >= _LARGE_FOLIOS[kind]


def _mount_of(folder: Path, mounts: Path) -> tuple[str, str]:
    """Return (type, options) of the deepest mount that holds ``folder``; nothing where that is not known."""
    path, best = os.path.realpath(folder), ("", "", "")
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "", ""
    for line in lines:
        _, at, kind, options, *_ = [*line.split(" "), "", "", "", ""]
        at = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), at)  # spaces are written as \\040
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best[0]):
            best = (at, kind, options)
    return best[1], best[2]
