"""A description of the machine that does not identify it: it contains no host names and no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("casckpt", "torch", "safetensors", "blake3", "numpy", "torch_checkpointing")


def describe(folder: Path, *, gpu: bool) -> dict[str, str]:
    """Describe the machine, the file system of ``folder``, and software versions. ``gpu``: include a GPU."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        **({"gpu": _gpu()} if gpu else {}),
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
        "file system": _file_system(folder),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(tree: Path) -> str:
    """Return the commit of a checkout, with "-dirty" appended if files differ from it, or "" without git."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    facts = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    names = {name.strip(): value.strip() for name, value in facts.items()}
    flags = names.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2") if name in flags), "")
    return " ".join(filter(None, (names.get("model name", platform.machine()), widest)))


def _gpu() -> str:
    from torch import cuda

    return cuda.get_device_name() if cuda.is_available() else "none"


def _file_system(folder: Path) -> str:
    """Return the type of the file system of ``folder``."""
    at = os.stat(folder).st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == f"{os.major(at)}:{os.minor(at)}":
            return rest.split()[0]
    return "unknown"
