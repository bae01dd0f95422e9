"""Virtual environments, created on demand, for peers whose requirements conflict with those of casckpt."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import platformdirs

_ALWAYS = ("numpy", "psutil")
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "olmo-0.1.0": ("ai2-olmo-core==0.1.0",),
    "olmo-3.0.0": ("ai2-olmo-core==3.0.0",),
}


class Absent(Exception):
    """A peer cannot be measured here. The message states the reason."""


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment, or this one if there are no requirements.

    Raises `Absent` if it cannot be created.
    """
    if environment not in REQUIREMENTS:
        return Path(sys.executable)
    folder = platformdirs.user_cache_path("casckpt") / "bench" / environment
    torch = f"torch=={version('torch').partition('+')[0]}"  # the version that all other peers use
    wanted = (torch, *REQUIREMENTS[environment], *_ALWAYS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _ensure(folder, wanted)
    return folder / "bin" / "python"


def _ensure(folder: Path, wanted: tuple[str, ...]) -> None:
    stamp = folder / "made-of"
    if stamp.exists() and stamp.read_text() == "\n".join(wanted):
        return
    print(f"bench: creating an environment with {', '.join(wanted)} (some minutes)", file=sys.stderr, flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    _run(str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *wanted)
    stamp.write_text("\n".join(wanted))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise Absent(f"its environment could not be created: {lines[-1][:200]}")
