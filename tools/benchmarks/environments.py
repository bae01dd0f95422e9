"""Virtual environments, created on demand, for peers that casckpt's environment does not have."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import platformdirs

_ALWAYS = ("numpy", "psutil")
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "olmo-0.1.0": ("ai2-olmo-core==0.1.0",),
    "olmo-3.0.0": ("ai2-olmo-core==3.0.0",),
    "orbax": ("orbax-checkpoint==0.12.8", "jax==0.10.2", "tensorstore==0.1.86", "ml_dtypes==0.6.0"),
    "buckets": ("s3torchconnector[dcp]==1.5.0", "runai-model-streamer[s3]==0.17.1", "safetensors==0.8.0"),
}
_HOW = {name: f"; on Debian and Ubuntu: apt install {name}" for name in ("fio", "restic")}
PROGRAMS: dict[str, tuple[str, ...]] = {"borg": ("borgbackup==1.4.5",), "dvc": ("dvc==3.67.1",)}


class Absent(Exception):
    """A peer cannot be measured here. The message states the reason."""


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment, or this one if there are no requirements.

    Raises `Absent` if it cannot be created.
    """
    if environment not in REQUIREMENTS:
        return Path(sys.executable)
    torch = f"torch=={version('torch').partition('+')[0]}"  # the version that all other peers use
    return _made(environment, (torch, *REQUIREMENTS[environment], *_ALWAYS)) / "python"


def versions_of(environments: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages in these environments, without torch."""
    wanted = [one for name in environments for one in REQUIREMENTS.get(name, ())]
    return {re.split(r"\W*==", one)[0].partition("[")[0]: one.partition("==")[2] for one in wanted}


def program(name: str, *, create: bool) -> str:
    """Return the path of a program, which is on PATH or, with ``create``, in an environment. Raises `Absent`."""
    if found := shutil.which(name):
        return found
    if name not in PROGRAMS or not create:
        raise Absent(f"it is not installed{_HOW.get(name, '')}")
    return str(_made(name, PROGRAMS[name]) / name)


def version_of(path: str) -> str:
    """Return the version that a program prints, or "" if it prints none."""
    for word in ("--version", "version"):
        printed = subprocess.run([path, word], capture_output=True, text=True, check=False).stdout
        if found := re.search(r"\d+\.\d+[\w.]*", printed):
            return found[0]
    return ""


def _made(name: str, wanted: tuple[str, ...]) -> Path:
    """Return the folder of an environment's programs. The environment is created if it does not exist."""
    folder = platformdirs.user_cache_path("casckpt") / "bench" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _ensure(folder, wanted)
    return folder / "bin"


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
