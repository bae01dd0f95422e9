"""A running job: the driver starts its ranks, and kills them, or fills the disk, as planned."""

from __future__ import annotations

import json
import signal
import time
from math import inf
from typing import TYPE_CHECKING, Any

from soaking.books import Wrong
from soaking.weeks.children import FULL, WRONG
from soaking.weeks.plan import JobPlan

if TYPE_CHECKING:
    from soaking.weeks.driver import Weeks

ALONE = 60.0  # seconds that ranks have to end after one of them was killed
STARTS, SAVES = 1800.0, 60.0  # seconds that a job, and each of its saves, may take longer, on a busy machine
ROOM = (0, 200_000, 1_000_000)  # bytes that a full disk has left
ALL, ONE = {-signal.SIGKILL}, {-signal.SIGKILL, 1, -signal.SIGABRT}  # torch's threads abort if a rank is gone
ALLOWED: dict[str, set[int]] = {
    "SIGTERM": {128 + signal.SIGTERM, -signal.SIGTERM}, "full disk": {FULL},
    "all ranks": ALL, "all ranks in a save": ALL, "one rank": ONE, "one rank in a save": ONE,
}  # fmt: skip
"""The exit statuses of ranks besides 0, by the planned end of their job, once that has come."""


class RunningJob:
    """A job of ``weeks``. ``strikes``: when its planned end comes, in seconds of the monotonic clock."""

    def __init__(self, weeks: Weeks, job: JobPlan) -> None:
        self.weeks, self.place, self.job, self.interval = weeks, weeks.place, job, weeks.interval()
        self.ranks = [f"rank {rank}" for rank in range(job.ranks)]
        self.late = time.monotonic() + STARTS + job.saves * (self.interval + SAVES)
        self.strikes, self.alone, self.struck = inf, inf, False
        self.beside: str | None = None
        self.beside_began = inf

    def run(self) -> None:
        """Run until all ranks have ended, and check how."""
        asked = self._asked()
        for rank, name in enumerate(self.ranks):
            self.weeks.start(name, self.job.library, self.job.ahead, "train", json.dumps(asked | {"rank": rank}))
        while left := [name for name in self.ranks if self.weeks.children[name].poll() is None]:
            self.weeks.breathe()
            self._act(left)
        statuses = [self.weeks.wait(name, 1) for name in self.ranks]
        if self.beside:
            self.weeks.end_command(self.beside, self.job.other, may_be_killed=self.job.beside_killed > 0)
        self._judge(statuses)

    def _asked(self) -> dict[str, Any]:
        """Return what all ranks are asked for."""
        job, place = self.job, self.place
        mirror, full = str(place.mirror) if job.mirrored else None, job.end == "full disk" and not place.has_disk
        meet = str(place.rendezvous(job.number))
        return {
            "folder": str(place.folder), "store": str(place.store), "mirror": mirror, "keep": self.weeks.keep,
            "key_file": str(place.key(job.key)), "least": self.weeks.ledger.last, "at": self.weeks.ran(),
            "interval": self.interval, "rendezvous": meet, "more": {"min_free": "1PB"} if full else {},
        } | {name: getattr(job, name) for name in ("number", "ranks", "saves", "key", "library", "prove")}  # fmt: skip

    def _act(self, left: list[str]) -> None:
        """Do what is due now. ``left``: the ranks that have not ended."""
        job, now, begun = self.job, time.monotonic(), self.weeks.ledger.by_job[self.job.number]
        if begun >= job.after and self.strikes == inf:
            self.strikes = now + job.delay
        if now >= self.strikes and not self.struck:
            self.struck = True
            self._strike()
        self._beside(now, begun)
        if begun >= job.after + 3:
            self.place.free()
        if len(left) < len(self.ranks):
            self.alone = min(self.alone, now)
        if now > min(self.late, self.alone + ALONE if self._is_one_killed else inf):
            self._end(left)

    def _beside(self, now: float, begun: int) -> None:
        """Start the command beside the job once half of the saves have begun, and kill it if that is planned."""
        job = self.job
        if self.beside_began == inf and begun > job.saves // 2 and self.weeks.ledger.saved:
            self.beside_began = now
            self.beside = self.weeks.begin_command(job.beside, job.other, job.beside_ahead, job.number)
        if self.beside and job.beside_killed and now > self.beside_began + job.beside_killed:
            self.weeks.children[self.beside].kill()

    def _strike(self) -> None:
        """Do what ends the job, or fill its disk."""
        end, children = self.job.end, self.weeks.children
        if end == "full disk":
            if self.place.has_disk:
                self.place.fill(ROOM[self.job.number % len(ROOM)])
            self.weeks.note_event(end, by="a file" if self.place.has_disk else "min_free")
        elif end != "end":
            some = [self.ranks[self.job.number % len(self.ranks)]] if end.startswith("one rank") else self.ranks
            for name in some:
                children[name].send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)

    @property
    def _is_one_killed(self) -> bool:
        return self.struck and self.job.end.startswith("one rank")

    def _end(self, left: list[str]) -> None:
        """Kill the ranks that are left, as a launcher does. Raises Wrong if no rank was killed."""
        if not self._is_one_killed:
            for name in left:
                self.weeks.children[name].send_signal(signal.SIGABRT)  # writes what its threads do to its log
                self.weeks.children[name].wait()
            raise Wrong(f"job {self.job.number} did not end: see {self.place.folder}/logs")
        for name in left:
            self.weeks.note_event("a rank did not end", job=self.job.number)
            self.weeks.children[name].kill()

    def _judge(self, statuses: list[int]) -> None:
        """Check how the ranks have ended. If the disk is full, collect before there is room again."""
        job = self.job
        self.weeks.books.note("ends", job=job.number, statuses=statuses, struck=self.struck, at=self.weeks.ran())
        allowed = {0} | (ALLOWED.get(job.end, set()) if self.struck else set())
        if WRONG in statuses or not allowed.issuperset(statuses):
            raise Wrong(f"the ranks of job {job.number} have ended with {statuses}: see {self.place.folder}/errors")
        if self.place.is_full:
            self.weeks.command("gc", "after", job.ahead)
            self.place.free()
