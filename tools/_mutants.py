"""See tools/mutants. Exits with 1 if a planted bug survives; not run by CI, for it takes long."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planted import PLANTED, Planted

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600


def copy_of_the_project(folder: Path) -> None:
    """All files that git tracks, as they are now."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def outcome(folder: Path, planted: Planted) -> str:
    """The first test that fails with the bug in place, "" if none does."""
    file = folder / planted.file
    before = file.read_text()
    file.write_text(before.replace(planted.before, planted.after))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *planted.tests.split()]
    copied = os.environ | {"PYTHONPATH": str(folder)}  # else processes of tests find the project that is installed
    try:
        done = subprocess.run(
            command, cwd=folder, env=copied, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    finally:
        file.write_text(before)
    if done.returncode not in (0, 1):  # nothing was collected, a name is wrong, ...
        sys.exit(f"{planted.name}: pytest left with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else ""


def main() -> None:
    """Plant all, or those whose names hold one of the words given."""
    words = sys.argv[1:]
    chosen = [one for one in PLANTED if not words or any(word in one.name for word in words)]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="casckpt-mutants-") as name:
        folder = Path(name)
        copy_of_the_project(folder)
        for planted in chosen:
            began = time.monotonic()
            killer = outcome(folder, planted)
            survived += not killer
            told = killer.rpartition("/")[2] or "SURVIVED"
            print(f"{time.monotonic() - began:5.0f} s  {planted.name}\n         {told}", flush=True)
    print(f"{len(chosen)} planted, {survived} survived")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
