"""Waiting for other ranks: a warning names those that have not come, and all learn when one gives up.

A `Meeting` needs nothing but the store of the process group, so ranks meet before any two of them are connected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any, Final

from casckpt.base.text import listed
from casckpt.errors import RankFailed

log = logging.getLogger(__name__)

FIRST = 30.0  # seconds that a rank waits for others until it warns,
NEXT = 300.0  # and from one warning to the next
HEARD_SECONDS = 5.0  # how long a rank that failed waits until the others know the reason
_LONGEST: Final = 0.25  # seconds between two looks into the store
_NAMED: Final = 8  # ranks
_END: Final = "\n"  # of the rank in a verdict


def late(ranks: Sequence[int], seconds: float) -> str:
    """Return the warning about ``ranks``, for which others have waited for ``seconds``."""
    return (
        f"waited {seconds:.0f} s for rank{'s' * (len(ranks) > 1)} {listed(ranks, _NAMED)}: every rank of the process "
        "group must make the same call of casckpt, not rank 0 alone. The wait goes on. Only Store.save and Store.load "
        "have no_dist=True, for one rank alone"
    )


@contextmanager
def announced(missing: Callable[[], Sequence[int]], tell: Callable[[str], None], delay: float = 0.0) -> Iterator[None]:
    """Log a warning while a wait takes long and ranks are ``missing``. ``tell``: sends it to the others that wait.

    ``delay``: seconds by which the first warning comes later than on other ranks.
    """
    over, lock, begun = Event(), Lock(), monotonic()

    def watch() -> None:
        pause = FIRST + delay
        while not over.wait(pause):
            pause = NEXT
            with lock:  # no warning is sent once the wait is over
                ranks = [] if over.is_set() else missing()
                if ranks:
                    tell(late(ranks, monotonic() - begun))
            if ranks:
                log.warning("%s", late(ranks, monotonic() - begun))

    Thread(target=watch, name="casckpt-waiting", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()


@dataclass(frozen=True)
class Meeting:
    """A meeting of the ranks of one group in ``store``, one of torch's. It works before two ranks are connected."""

    store: Any
    rank: int
    size: int

    def come(self, stage: str, seconds: float, problem: str = "") -> None:
        """Wait until all ranks have come to ``stage``, for at most ``seconds``.

        ``problem``: why this rank cannot go on. If any rank has a problem, or has waited for too long, every rank that
        came raises the same RankFailed, and so does one that comes later.
        """
        try:
            verdict = self._verdict(stage, seconds, problem)
        except RuntimeError as error:  # the process with the store died: rank 0, or its launcher
            raise RankFailed(
                f"rank 0 died, or the process that has the store of the process group: nothing was saved or loaded; "
                f"start again ({str(error)[:200]})",
                rank=0,
            ) from error
        if verdict:
            who, _, text = verdict.partition(_END)
            raise RankFailed(text, rank=int(who))

    def _verdict(self, stage: str, seconds: float, problem: str) -> str:
        """Return the rank that failed and the reason, a line each; "" if all have come."""
        store, key = self.store, f"{stage}/verdict"
        begun, due = monotonic(), min(FIRST, seconds)
        if problem:
            store.set(f"{stage}/problem", f"{self.rank}{_END}{problem}")
        store.set(f"{stage}/{self.rank}", "")
        if store.add(f"{stage}/came", 1) % self.size == 0:  # an earlier process group may have counted in this store
            self._decide(stage, [])
        while not store.check([key]):
            waited = monotonic() - begun
            if waited >= due:
                absent, due = self._absent(stage, range(self.size)), min(waited + NEXT, max(waited, seconds))
                if waited >= seconds:
                    self._decide(stage, absent or [self.rank])
                elif absent:
                    log.warning("%s", late(absent, waited))
            sleep(min(_LONGEST, waited / 10))  # short at first, since the ranks of a job come at about the same time
        verdict: str = store.get(key).decode()[1:]
        if verdict:
            self._let_all_hear(stage)
        return verdict

    def _decide(self, stage: str, absent: list[int]) -> None:
        """Set the verdict, unless there is one."""
        key = f"{stage}/problem"
        verdict = self.store.get(key).decode() if self.store.check([key]) else ""
        if absent:
            problem = verdict and f" ({verdict.partition(_END)[2]})"
            verdict = (
                f"{absent[0]}{_END}not all ranks came to save or load together (absent: [{listed(absent, _NAMED)}]); "
                f"all of them must make the call. Look at the log of rank {absent[0]}, then start again{problem}"
            )
        self.store.compare_set(f"{stage}/verdict", "", f"={verdict}")

    def _absent(self, stage: str, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have not come, with few questions if they are few."""
        if self.store.check([f"{stage}/{rank}" for rank in ranks]):
            return []
        half = len(ranks) // 2
        return [*self._absent(stage, ranks[:half]), *self._absent(stage, ranks[half:])] if half else list(ranks)

    def _let_all_hear(self, stage: str) -> None:
        """Wait until those that have come have read the verdict: the store may end with this process."""
        with suppress(RuntimeError):
            heard, end = self.store.add(f"{stage}/heard", 1), monotonic() + HEARD_SECONDS
            while heard < self.store.add(f"{stage}/came", 0) and monotonic() < end:
                sleep(0.01)
                heard = self.store.add(f"{stage}/heard", 0)
