"""The folder of a soak of weeks: its plan, the libraries, the keys, and the disk of the store."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from soaking.weeks.plan import KEYS

ROOT = Path(__file__).resolve().parents[3]
DISK = 2 << 30  # bytes; a sparse file


class Place:
    """Where everything is. What an earlier run has chosen stays, whatever is ``asked``."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self.folder = folder
        at = folder / "plan.json"
        if not at.exists():
            chosen = {name: getattr(asked, name) for name in ("seed", "hours", "saves", "longest")}
            commits = {"before": _commit(asked.before or "HEAD"), "after": _commit("HEAD")}
            at.write_text(json.dumps(chosen | commits))
        chosen = json.loads(at.read_text())
        self.seed, self.hours = int(chosen["seed"]), float(chosen["hours"])
        self.saves, self.longest = int(chosen["saves"]), int(chosen["longest"])
        self.commits = {name: chosen[name] for name in ("before", "after")}
        self._disk = folder / "disk"
        self.store, self.mirror = self._disk / "store", folder / "mirror"
        self._filler = self._disk / "filler"

    def enter(self) -> None:
        """Make what is missing."""
        for name in ("disk", "logs", "printed", "keys", "lib", "rendezvous", "cache"):
            (self.folder / name).mkdir(exist_ok=True)
        shutil.rmtree(self.folder / "lost", ignore_errors=True)
        shutil.rmtree(self.folder / "lib" / "tools", ignore_errors=True)
        shutil.copytree(ROOT / "tools" / "soaking", self.folder / "lib" / "tools" / "soaking")
        for name, commit in self.commits.items():
            self._copy_library(self.folder / "lib" / name, commit)
        for number in range(KEYS):
            if not self.key(number, public=True).exists():
                _run("openssl", "genpkey", "-algorithm", "ed25519", "-out", self.key(number))
                _run("openssl", "pkey", "-in", self.key(number), "-pubout", "-out", self.key(number, public=True))
        self._mount()
        self.free()

    def leave(self) -> None:
        """Unmount the disk."""
        if self.has_disk:
            _told("umount", str(self._disk))

    @staticmethod
    def _copy_library(at: Path, commit: str) -> None:
        new = at.with_suffix(".new")
        if at.exists():
            return
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        with subprocess.Popen(["git", "archive", commit, "casckpt"], cwd=ROOT, stdout=subprocess.PIPE) as made:
            subprocess.run(["tar", "-x", "-C", new], stdin=made.stdout, check=True)
        new.rename(at)

    # the disk

    def _mount(self) -> None:
        """Mount a disk of its own for the store, if this is root. Otherwise, no disk is ever full."""
        image = self.folder / "disk.img"
        if self.has_disk or os.geteuid():
            return
        if not image.exists():
            new = image.with_suffix(".new")
            with new.open("wb") as file:
                file.truncate(DISK)
            _run("mkfs.ext4", "-q", "-m", "0", new)
            new.rename(image)
        with suppress(subprocess.CalledProcessError, FileNotFoundError):
            _run("mount", "-o", "loop", image, self._disk)

    @property
    def has_disk(self) -> bool:
        """Whether the store has a disk of its own."""
        return self._disk.is_mount()

    @property
    def is_full(self) -> bool:
        """Whether the disk is full."""
        return self._filler.exists()

    def fill(self, room: int) -> None:
        """Fill the disk, as another program does, but for some bytes."""
        now = os.statvfs(self._disk)
        with self._filler.open("wb") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, now.f_bavail * now.f_frsize - room)

    def free(self) -> None:
        """Undo `fill`."""
        self._filler.unlink(missing_ok=True)

    def lose_mirror(self) -> None:
        """Remove the mirror, at one instant for all others."""
        lost = self.folder / "lost"
        with suppress(FileNotFoundError):
            self.mirror.rename(lost)
        shutil.rmtree(lost, ignore_errors=True)

    # files

    def key(self, number: int, *, public: bool = False) -> Path:
        """Return the file of a private or public key."""
        return self.folder / "keys" / f"{number}.{'pub' if public else 'key'}"

    def rendezvous(self, number: int) -> Path:
        """Return a new file at which the ranks of a job meet. An earlier run may have been killed in this job."""
        at = self.folder / "rendezvous" / str(number)
        at.unlink(missing_ok=True)
        return at

    def log(self, name: str) -> IO[str]:
        """Open the log of a child."""
        return (self.folder / "logs" / name).open("a")

    def printed(self, name: str) -> Path:
        """Return the file of what a child prints."""
        return self.folder / "printed" / name

    def environ(self, library: str) -> dict[str, str]:
        """Return the environment of a child that uses a library."""
        at = self.folder / "lib"
        path = f"{at / library}:{at / 'tools'}"
        cache = str(self.folder / "cache")
        return os.environ | {"PYTHONPATH": path, "CASCKPT_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}


def _run(*words: str | Path) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)


def _commit(name: str) -> str:
    command = ("git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return found or sys.exit(f"soak: {name!r} is not a commit of this checkout")


def _told(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
