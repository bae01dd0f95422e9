"""The process that starts, kills and stops all other processes, waits for them, and adds up their counts."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import casckpt
from casckpt.errors import StorageError
from casckpt.repository.repository import microseconds
from soaking.books import Books, Wrong
from soaking.growth import growth, held
from soaking.looks import look, make
from soaking.nights import OPTIONS, SKEW, nights
from soaking.workers import LASTING, REVOCABLE, ROLES, TELLS_OF_REVOKED, BegunAnew, Worker, overtake
from tests.support.proxy import Proxy

ROOT = Path(__file__).resolve().parent.parent.parent
ENDS = (signal.SIGINT, signal.SIGTERM)
WRONG = 3
NIGHTS = "nights"
ONCE: dict[str, Callable[[Worker], object]] = {"make": make, "pause": look, "overtake": overtake}
SAMPLE_EVERY = 2.0  # seconds
REST = 300.0  # seconds: the limit for the current round of the processes that are not killed
LOOK = 3600.0  # seconds: the limit for a pause
OVERTAKEN = 10.0  # seconds: the limit for stopping a process until a gc revokes its save


class Ended(Exception):
    """A signal ends the soak."""


def _end(signum: int, frame: object) -> NoReturn:
    raise Ended


@dataclass
class Soak:
    """A run of the soak."""

    asked: argparse.Namespace
    folder: Path
    random: random.Random

    def __post_init__(self) -> None:
        self.books = Books(self.folder)
        self.counts: Counter[str] = Counter(self._earlier())
        self.children: dict[int, str] = {}
        self.killed: set[int] = set()
        self.options = dict(one.split("=", 1) for one in self.asked.storage_option)
        self.proxy = Proxy(self.options["endpoint_url"]) if self.asked.nights else None
        self.began, self.gathered = time.time_ns() // 10**9, time.monotonic()

    def _earlier(self) -> dict[str, int]:
        path = self.folder / "counts.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def run(self) -> int:
        """Run for the requested time. Return the exit status."""
        for left in (self._rests(), *self.folder.glob("rests.*")):
            left.unlink(missing_ok=True)
        self._note_run()
        for one in ENDS:  # even if the signal is ignored: if started with &, SIGINT is ignored
            signal.signal(one, _end)
        good = self._holds(self._rounds)
        for one in ENDS:
            signal.signal(one, signal.SIG_IGN)
        good &= self._holds(self._end_all)
        self._gather()
        sampled, grown = growth(self.books, self.began)
        for text in grown:
            self._fail(text)
        print(json.dumps(dict(sorted(self.counts.items())) | {"sampled": sampled, "grown": grown}, indent=2))
        return 0 if good and not grown else 1

    def _note_run(self) -> None:
        """Record the commit of this run. Runs from before this file existed do not have one."""
        if self.counts and not (self.folder / "runs").exists():
            self.books.note("runs", commit=None, time=None)
        told = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        found = subprocess.run(told, cwd=ROOT, check=False, capture_output=True, text=True)
        self.books.note("runs", commit=found.stdout.strip() or None, time=self.began)

    def _holds(self, what: Callable[[], None]) -> bool:
        """Run a block. Record an error, and return whether there was none."""
        try:
            what()
        except Ended:
            pass
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            self._fail(traceback.format_exc())
            return False
        return True

    def _fail(self, text: str, role: str = "soak") -> None:
        self.books.note("failures", role=role, pid=os.getpid(), time=time.time(), text=text)
        print(text, file=sys.stderr)

    def _rounds(self) -> None:
        ends = time.monotonic() + 3600 * self.asked.hours
        self._once("make")
        if self.proxy is not None:
            self._start(NIGHTS)
        while time.monotonic() < ends:
            self._at_work(min(ends, time.monotonic() + self.asked.pause))
            self._pause()

    def _at_work(self, until: float) -> None:
        """Run all workers, and occasionally kill or stop one of them."""
        self._rests().unlink(missing_ok=True)
        calm = until - self.asked.pause / 3
        for role in [role for role in ROLES if role not in self.children.values()]:
            self._start(role)
        while time.monotonic() < until:
            time.sleep(self.random.uniform(0.2, 2) * self.asked.every)
            if time.monotonic() < calm:
                self._hit()
            while found := self._ended():
                if (role := self._judged(*found)) in ROLES:
                    self._start(role)

    def _pause(self) -> None:
        """Stop all work: the processes that are never killed rest, and all others are killed."""
        self._end_all(but=LASTING | {NIGHTS})
        self._rests().touch()
        late = time.monotonic() + REST
        while not all(self._rests(pid).exists() for pid, role in self.children.items() if role in LASTING):
            if found := self._ended():
                raise Wrong(f"{self._judged(*found)} ended, and is never killed")
            if time.monotonic() > late:
                raise Wrong(f"no end of a round in {REST} s: {self.children}")
            time.sleep(0.05)
        self._once("pause")
        self._gather()

    def _rests(self, pid: int | None = None) -> Path:
        """Return a file that exists while all workers should rest or, for a worker, while that worker rests."""
        return self.folder / ("rest" if pid is None else f"rests.{pid}")

    def _hit(self) -> None:
        """Kill a process, or stop it for a while.

        Some savers and copiers remain stopped until a gc revokes their save.
        """
        drawn = self.random.random()
        chosen = REVOCABLE if drawn < 0.05 else ROLES.keys() - LASTING
        pid = self.random.choice([pid for pid, role in self.children.items() if role in chosen])
        if drawn > 0.25:
            self.killed.add(pid)
            os.kill(pid, signal.SIGKILL)
            self.counts["killed"] += 1
            self.counts[f"killed: {self.children[pid]}"] += 1
            time.sleep(0.05)
            return
        os.kill(pid, signal.SIGSTOP)
        if drawn < 0.05:
            self._wait(self._start("overtake"), OVERTAKEN)
            self.counts["overtaken"] += 1
        else:
            time.sleep(self.random.uniform(0, 1))
        os.kill(pid, signal.SIGCONT)
        self.counts["stopped"] += 1

    def _ended(self) -> tuple[int, int] | None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, status) if pid else None

    def _judged(self, pid: int, status: int) -> str:
        """Return the role of a process that has ended.

        Raises Wrong if the process had not finished and the soak did not end it.
        """
        role, how = self.children.pop(pid), os.waitstatus_to_exitcode(status)
        was_killed = pid in self.killed
        self.killed.discard(pid)
        if how == 0 or (was_killed and how == -signal.SIGKILL):
            return role
        told = f"exit status {how}" if how > 0 else signal.Signals(-how).name
        raise Wrong(f"{role}, pid {pid}, ended by itself: {told}")

    def _once(self, role: str) -> None:
        """Run a worker once in a process, and wait for it."""
        if not self._wait(self._start(role), LOOK):
            raise Wrong(f"no end of {role!r} in {LOOK} s")

    def _wait(self, pid: int, seconds: float) -> bool:
        """Wait for a process to end, up to a limit. Return whether it has ended."""
        late = time.monotonic() + seconds
        while time.monotonic() < late:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._judged(pid, status)
                return True
            time.sleep(0.02)
        return False

    def _start(self, role: str) -> int:
        seed = self.random.randrange(1 << 62)
        child = os.fork()
        if child == 0:
            self._work(role, seed)
        self.children[child] = role
        return child

    def _work(self, role: str, seed: int) -> NoReturn:
        """In a child: run rounds until the child is killed, or run a single round."""
        status = 0
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
            for one in ENDS:
                signal.signal(one, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends this process
            os.nice(self.asked.nice)
            if role == NIGHTS and self.proxy is not None:
                nights(self.proxy, self._rests(), self.books, random.Random(seed))  # noqa: S311
            worker = self._worker(role, seed)
            logging.getLogger(TELLS_OF_REVOKED).addHandler(BegunAnew(worker))
            if role in ONCE:
                ONCE[role](worker)
            else:
                self._go_on(role, worker)
        except Ended:  # sent to the whole group before this process ignored it
            pass
        except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
            self._fail(traceback.format_exc(), role)
            status = WRONG
        os._exit(status)

    def _go_on(self, role: str, worker: Worker) -> NoReturn:
        sampled = 0.0
        while True:
            try:
                ROLES[role](worker)
            except StorageError as error:
                worker.did("storage error", text=str(error)[:200])
                time.sleep(1)
            if role in LASTING:
                self._rest()
            if role in LASTING and worker.warm and time.monotonic() > sampled + SAMPLE_EVERY:
                sampled = time.monotonic()
                self.books.note(f"samples.{role}.{os.getpid()}.{self.began}", **held())
            worker.wait(self.asked.idle)

    def _rest(self) -> None:
        """In a child: rest as long as all workers should rest."""
        mine = self._rests(os.getpid())
        while self._rests().exists():
            mine.touch()
            time.sleep(0.05)
        mine.unlink(missing_ok=True)

    def _worker(self, role: str, seed: int) -> Worker:
        """Open both stores: at night through the proxy, with a clock that is wrong by some minutes."""
        options: dict[str, Any] = self.options
        at_night = self.proxy is not None and role in ROLES
        if self.proxy is not None and at_night:
            options = {**options, **OPTIONS, "endpoint_url": self.proxy.endpoint}
        cache = self.folder / "caches" / str(seed % 3)
        here, there = (
            casckpt.open(f"{self.asked.storage}/{name}", storage_options=options, cache_dir=cache, cache_bytes=0)
            for name in ("store", "copy")
        )
        wrong = seed % (2 * SKEW) - SKEW if at_night else 0
        for store in (here, there):
            store.repository.clock = lambda: microseconds() + wrong
        return Worker(here, there, self.books, random.Random(seed), at_night=at_night)  # noqa: S311

    def _end_all(self, but: frozenset[str] = frozenset()) -> None:
        """Kill all processes. Raises Wrong if one of them had already ended on its own."""
        wrong = []
        for pid in [pid for pid, role in self.children.items() if role not in but]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                self.killed.add(pid)
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            try:
                self._judged(pid, status)
            except Wrong as error:
                wrong.append(error)
            self._rests(pid).unlink(missing_ok=True)
        if wrong:
            raise wrong[0]

    def _gather(self) -> None:
        """Add the workers' counts to the totals of all runs while no process is working."""
        now = time.monotonic()
        seconds = int(now - self.gathered)
        self.gathered += seconds
        self.counts["seconds"] += seconds
        for path in self.folder.glob("counts.[0-9]*"):
            for one in self.books.lines(path.name):
                self.counts[one["did"]] += one.get("times", 1)
            path.unlink()
        temporary = self.folder / "counts.new"
        temporary.write_text(json.dumps(self.counts))
        temporary.replace(self.folder / "counts.json")
