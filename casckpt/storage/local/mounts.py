"""Mounts: whether listings of a folder can be trusted to show what other hosts wrote."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_SURE = {"noac", "actimeo=0", "acdirmax=0"}


def stale_listings(path: Path, mounts: Path = _MOUNTS) -> str:
    """Return why listings of ``path`` may lag behind, and what to do; "" where they do not, or nothing is known."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    kind, options = _mount_of(os.path.realpath(path), lines)
    if not re.fullmatch(r"nfs\d?", kind) or _SURE & set(options.split(",")):
        return ""
    return (
        f"{path} is on NFS, mounted with attribute caching, so that a listing may miss what another host has just "
        "written. Mount it with noac (or actimeo=0), or run this on the file server"
    )


def _mount_of(path: str, lines: list[str]) -> tuple[str, str]:
    """Return (type, options) of the deepest mount that holds ``path``."""
    best = ("", "", "")
    for line in lines:
        _, at, kind, options, *_ = [*line.split(" "), "", "", "", ""]
        at = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), at)  # spaces are written as \\040
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best[0]):
            best = (at, kind, options)
    return best[1], best[2]
