"""System calls of plain commands that fail, because strace injects an error.

``python -m tests.support.injected HOW FOLDER COUNT SEED [JOB ...]`` first traces each job without errors, and counts
its calls. It then draws a job, a kind of call, an error that such a call can return, and one of the calls that name a
file of the store, the source, the target or the cache, COUNT times. The job runs again on a copy of the store, and
strace fails that call (or, in a third of the cases, this and all later ones of the kind). It must end with a clear
error or succeed, and `plain_jobs.check` must pass. Each result is a line of ``FOLDER/results``. The exit status is 1 if
there is a fault.

HOW: "plain" starts each job as users do; "forked" saves its imports, 5 to 10 seconds of CPU time: strace attaches to a
fork of this process, which then runs the same command line. strace counts the calls of each thread, so a call is only
drawn if the calls with this number of all threads are the job's own, not Python's.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import torch

from tests.support.killed_saves import run_and_exit, side_by_side
from tests.support.plain_jobs import JOBS, Place, check, command, start
from tests.support.tally import tally

LIMIT: Final = 120  # seconds for a command
_SET_PTRACER: Final = 0x59616D61
_ONCE: Final = ("EINTR", "EAGAIN")  # Python repeats such calls for ever, or waits for a lock
_NAMES: Final = "EIO EACCES EROFS ESTALE"
_NEW: Final = f"{_NAMES} ENOSPC EDQUOT"
ERRORS: Final = {
    kind: codes.split()
    for kinds, codes in {
        "openat": f"{_NEW} EMFILE ENFILE EINTR",
        "newfstatat statx statfs readlink": "EIO EACCES ESTALE",
        "read pread64 preadv2": "EIO ESTALE EINTR",
        "write pwrite64 pwritev2": "EIO ESTALE EINTR ENOSPC EDQUOT EFBIG",
        "fsync": "EIO ENOSPC EDQUOT ESTALE EROFS EINTR",
        "fdatasync": "EIO ENOSPC EDQUOT ESTALE EINTR",
        "close": "EIO EDQUOT EINTR",
        "linkat renameat2 renameat rename mkdirat mkdir": _NEW,
        "unlinkat unlink rmdir": f"{_NAMES} EBUSY",
        "ftruncate": "EIO ENOSPC EDQUOT EINTR EROFS",
        "fallocate": "EIO ENOSPC EDQUOT EINTR ESTALE",
        "getdents64": "EIO EACCES ESTALE",
        "flock": "EINTR EAGAIN ENOLCK EIO",
        "fcntl": "EAGAIN ENOLCK EIO EACCES",
        "fchmod chmod utimensat": f"{_NAMES} EPERM",
        "lseek fstatfs": "EIO ESTALE",
        "copy_file_range": "EIO ENOSPC EXDEV ESTALE",
    }.items()
    for kind in kinds.split()
}
"""The errors that each kind of call may return."""
_LINE = re.compile(r"(\d+) +(?:(\w+)\(|<\.\.\. (\w+) resumed>)")


@dataclass(frozen=True)
class Fault:
    """An error ``code`` of the call number ``at`` of a kind in each thread, or also of all later ones."""

    job: str
    call: str
    at: int
    code: str
    lasts: bool

    @property
    def option(self) -> str:
        return f"inject={self.call}:error={self.code}:when={self.at}{'+' if self.lasts else ''}"


@dataclass
class Result:
    """How a job ended. ``hit``: the call that failed. ``wrong``: what is wrong, or "" if nothing is."""

    fault: Fault
    status: int | None
    told: str
    hit: str
    wrong: str
    seconds: float


def traced(how: str, name: str, place: Place, *options: str) -> tuple[int | None, str, list[str]]:
    """Run a job under strace. Return its status (None if it hangs), its output, and the lines of the trace."""
    log, told = (place.folder.parent / f"{place.folder.name}.{kind}" for kind in ("trace", "told"))
    strace = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", "signal=none", *options]
    status = _plain(strace, name, place, told) if how == "plain" else _forked(strace, name, place, told)
    text, lines = told.read_text(errors="replace"), log.read_text(errors="replace").splitlines()
    log.unlink()
    told.unlink()
    return status, text, lines


def _plain(strace: list[str], name: str, place: Place, told: Path) -> int | None:
    words = [*strace, "--seccomp-bpf", "-qq", "--", *command(name, place)]
    with told.open("wb") as file, subprocess.Popen(
        words, env=place.environment(), cwd="/", stdout=file, stderr=file, start_new_session=True
    ) as process:  # fmt: skip
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def _forked(strace: list[str], name: str, place: Place, told: Path) -> int | None:
    waits, goes = os.pipe()
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(-1))
        os.close(goes)
        os.read(waits, 1)
        _become(name, place, told)
    os.close(waits)
    with subprocess.Popen([*strace, "-p", str(child)], stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr
        line = tracer.stderr.readline()
        assert "attached" in line, line + tracer.stderr.read()
        os.close(goes)
        timer = threading.Timer(LIMIT, os.kill, (child, signal.SIGKILL))
        timer.start()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        timer.cancel()
        tracer.stderr.read()
    return None if status == -signal.SIGKILL else status


def _become(name: str, place: Place, told: Path) -> NoReturn:
    """Run a job in this fork, as Python does after its imports, and exit."""
    status = 1
    try:
        with told.open("wb") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        os.chdir("/")
        try:
            status = start(name, place)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:  # noqa: BLE001 - as Python shows it
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def calls(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the thread, the kind and the text of each call, in the order in which they ended."""
    begun: dict[str, str] = {}
    for line in lines:
        if found := _LINE.match(line):
            thread, name, resumed = found.groups()
            if line.endswith("<unfinished ...>"):
                begun[thread] = line
            else:
                yield thread, name or resumed, begun.pop(thread, "") + line if resumed else line


def ours(lines: Iterable[str], folder: Path) -> dict[str, list[bool]]:
    """Return for each kind, by number, whether every thread's call of this number names a file of the folder."""
    threads: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for thread, name, text in calls(lines):
        threads[thread, name].append(f"{folder}/" in text and f"{folder}/scripts" not in text)
    found: dict[str, list[bool]] = defaultdict(list)
    for (_, name), named in threads.items():
        held = found[name]
        held += [True] * (len(named) - len(held))
        for number, is_ours in enumerate(named):
            held[number] &= is_ours
    return found


def draw(dice: random.Random, counted: dict[str, dict[str, list[bool]]]) -> Fault:
    """Draw a fault: a job, a kind of call, one of its calls, and an error."""
    job = dice.choice(list(counted))
    kinds = {kind: named for kind, named in counted[job].items() if any(named)}
    kind = dice.choice(sorted(kinds))
    numbers = [number for number, is_ours in enumerate(kinds[kind], 1) if is_ours]
    at, code = dice.choice(numbers), dice.choice(ERRORS[kind])
    lasts = dice.random() < 1 / 3 and code not in _ONCE and all(kinds[kind][at - 1 :])
    return Fault(job, kind, at, code, lasts)


def unclear(fault: Fault, status: int | None, told: str) -> str:
    """Return what is wrong with how a job ended, or ""."""
    if status is None:
        return "it hangs"
    if "Exception ignored" in told or "leaked" in told:
        return "it leaves something behind"
    if status == 0:
        return "" if "Traceback" not in told else "it succeeds with a traceback"
    last = told.strip().rpartition("\n")[2]
    if fault.job == "save":
        is_own = last.startswith("casckpt.errors.") or (re.match(r"\w*Error: ", last) and " '/" in last)
        return "" if status == 1 and is_own else "its error is not casckpt's, and names no file"
    is_said = "casckpt: " in told or (fault.job == "gc" and "cannot delete" in told)  # gc has done the rest
    if "Traceback" in told or "--debug to see" in told or not is_said:
        return "its error is not clear"
    return "" if status in (1, 4) else f"its status is {status}"


def strike(how: str, base: Place, place: Place, fault: Fault) -> Result:
    """Run a job with a fault on a copy of ``base``, and check what it leaves."""
    shutil.copytree(base.folder, place.folder)
    began = time.monotonic()
    status, told, lines = traced(how, fault.job, place, "-e", f"trace={fault.call}", "-e", fault.option)
    hits = [text for _, _, text in calls(lines) if text.endswith("(INJECTED)")]
    hit = (hits or [""])[0].replace(f"{place.folder}/", "")
    wrong = unclear(fault, status, told)
    if hits and not all(f"{place.folder}/" in text for text in hits) and not fault.lasts:
        hit = ""  # another call than the one that was drawn
    if hit and not wrong:
        wrong = checked(fault, place, status == 0)
    if not wrong:
        shutil.rmtree(place.folder)
    return Result(fault, status, told, hit, wrong if hit else "", time.monotonic() - began)


def checked(fault: Fault, place: Place, ended_well: bool) -> str:
    """Check what a job left, in a child. Return what is wrong, or ""."""
    log = place.folder / "wrong"
    child = os.fork()
    if not child:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        signal.alarm(LIMIT)
        run_and_exit(partial(check, fault.job, place, ended_well))
    return f"{log.read_text()[-3000:]} " if os.waitpid(child, 0)[1] else ""


def sweep(how: str, folder: Path, count: int, seed: int, jobs: list[str]) -> None:
    """Count the calls of each job, then inject ``count`` errors."""
    base, dice, counted = Place(folder / "base"), random.Random(seed), {}
    child = os.fork()
    if not child:
        run_and_exit(base.fill)
    assert not os.waitpid(child, 0)[1]
    for name in jobs:
        place = Place(folder / f"count {name}".replace(" ", "-"))
        shutil.copytree(base.folder, place.folder)
        status, told, lines = traced(how, name, place, "-e", f"trace=?{',?'.join(ERRORS)}")
        assert status == 0, told
        counted[name] = ours(lines, place.folder)
        shutil.rmtree(place.folder)
    sums = {name: {kind: sum(named) for kind, named in kinds.items() if any(named)} for name, kinds in counted.items()}
    (folder / "counted").write_text(json.dumps(sums, indent=1))
    faults = [draw(dice, counted) for _ in range(count)]

    def one(number: int, fault: Fault) -> None:
        result = strike(how, base, Place(folder / f"{number}"), fault)
        if result.hit:
            tally("strace: an injected error")
        with (folder / "results").open("a") as file:
            file.write(json.dumps({"number": number, **asdict(result)}) + "\n")

    assert side_by_side([partial(one, number, fault) for number, fault in enumerate(faults)], 2)


def report(folder: Path) -> int:
    """Print how the jobs ended, and each fault. Return the exit status."""
    rows = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
    ended = Counter(f"{row['fault']['job']}: {row['status']}" for row in rows if row["hit"])
    sys.stdout.write(f"{len(rows)} runs, in {sum(bool(row['hit']) for row in rows)} a call failed: {dict(ended)}\n")
    wrong = [row for row in rows if row["wrong"]]
    for row in wrong:
        sys.stdout.write(f"\n{row['number']} {row['fault']}\n{row['hit']}\n{row['wrong']}\n{row['told'][-2000:]}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    how, where, number, seed, *names = sys.argv[1:]
    Path(where).mkdir(parents=True, exist_ok=True)
    sweep(how, Path(where), int(number), int(seed), names or list(JOBS))
    sys.exit(report(Path(where)))
