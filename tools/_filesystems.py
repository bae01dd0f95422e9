"""See tools/test-filesystems."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from _result_table import Counts, ResultTable, counts_of
from casckpt.storage.local import syscalls
from casckpt.storage.local.store import LocalStore

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("file system", "new files", "direct I/O", "`doctor`", "passed", "skipped", "failed", "kernel", "when")
TABLE = ResultTable("file systems", COLUMNS, keys=1)
TESTS = (
    "tests/storage/local",  # the storage contract, kills at system calls, links, renames, durable names, direct I/O
    "tests/repository/test_catalogue.py", "tests/repository/test_processes.py",  # locks, of SQLite, too
    "tests/frontends/interchange/test_new_files.py",  # the locks of exports
    "tests/store/test_killed.py", "tests/store/test_struck.py", "tests/store/test_durable.py",
    "tests/upkeep/test_doctor.py",
)  # fmt: skip
NAMING = {"UNNAMED": "unnamed, then linked", "LINK": "named, then linked", "RENAME": "named, then renamed"}


def on_loop_device(kind: str, image: Path, at: Path) -> None:
    """Mount a new file system of 1 GiB."""
    with image.open("wb") as file:
        file.truncate(1 << 30)
    run(f"mkfs.{kind}", "-q", image)
    run("mount", "-o", "loop", image, at)


def overlay(_: str, beside: Path, at: Path) -> None:
    """Mount an overlay whose layers are on the disk."""
    layers = {name: beside / name for name in ("lower", "upper", "work")}
    for layer in layers.values():
        layer.mkdir(parents=True)
    options = ",".join(f"{name}dir={layer}" for name, layer in layers.items())
    run("mount", "-t", "overlay", "overlay", "-o", options, at)


def tmpfs(kind: str, _: Path, at: Path) -> None:
    """Mount a file system in memory."""
    run("mount", "-t", kind, "-o", "size=1g", kind, at)


def nfs(_: str, beside: Path, at: Path) -> None:
    """Export a folder of the disk to this host, and mount it as gc requires it."""
    beside.mkdir()
    run("exportfs", "-o", "rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure", f"127.0.0.1:{beside}")
    run("mount", "-t", "nfs4", "-o", "noac", "127.0.0.1:/", at)


KINDS: dict[str, Callable[[str, Path, Path], None]] = {
    "ext4": on_loop_device,
    "xfs": on_loop_device,
    "btrfs": on_loop_device,
    "overlay": overlay,
    "tmpfs": tmpfs,
    "nfs": nfs,
}


def run(*command: str | Path) -> None:
    """Run a command. Raises CalledProcessError with its output, or FileNotFoundError."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def result(folder: Path) -> list[str]:
    """Run the tests in a folder. Return the cells of its row, after the first one."""
    passed, skipped, failed = tests(folder)
    return [*abilities(folder), doctor(folder), f"{passed}", f"{skipped}", f"{failed}", kernel(),
            f"{datetime.now(UTC):%Y-%m-%d}"]  # fmt: skip


def abilities(folder: Path) -> tuple[str, str]:
    """Return how casckpt creates files here, and whether it can bypass the page cache."""
    store = LocalStore(folder / "abilities")
    store.put("a", b"1")
    with (store.path / "a").open("rb") as file:
        return NAMING[store._files.way.name], "yes" if syscalls.set_direct(file.fileno(), True) else "no"


def doctor(folder: Path) -> str:
    """Return the problems that `casckpt doctor` finds."""
    command = [sys.executable, "-m", "casckpt", "doctor", str(folder / "doctor"), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wrong = [finding["name"] for finding in json.loads(done.stdout)["checks"] if finding["ok"] is False]
    return ", ".join(wrong) or "no problem"


def kernel() -> str:
    """Return the kernel's version, as in 6.18."""
    return ".".join(platform.release().split(".")[:2])


def tests(folder: Path) -> Counts:
    """Run the tests with all their files in this folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    there = {"TMPDIR": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder)}
    environment = os.environ | there | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    return counts_of(done.stdout, done.returncode)


def row(kind: str) -> list[str]:
    """Mount a file system and run the tests on it. Return its row."""
    with tempfile.TemporaryDirectory(prefix="casckpt-") as folder:
        at = Path(folder, "mounted")
        at.mkdir()
        try:
            KINDS[kind](kind, Path(folder, "beside"), at)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            why = getattr(error, "stderr", None) or str(error)
            print(f"{kind} cannot be mounted: {why}", file=sys.stderr)
            return [kind, "not run", *[""] * 5, kernel(), f"{datetime.now(UTC):%Y-%m-%d}"]
        try:
            return [kind, *result(at)]
        finally:
            run("umount", "--lazy", at)  # a process of a test that failed may still use it


def main() -> None:
    """Run the tests on each requested file system."""
    parser = argparse.ArgumentParser(prog="tools/test-filesystems", description="See tools/test-filesystems.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.folder:
        print(dict(zip(COLUMNS[1:], result(asked.folder), strict=True)))
        return
    if os.geteuid():
        parser.error("mounting needs root; --folder does not")
    for kind in asked.kinds or KINDS:
        TABLE.write(*row(kind))


if __name__ == "__main__":
    main()
