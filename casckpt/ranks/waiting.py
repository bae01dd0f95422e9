"""Waiting for other ranks.

Warnings name the absent ranks, and all ranks raise an error when one rank gives up. A `Meeting` needs only the store
of the process group, so ranks can meet before they are connected to each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any, Final

from casckpt.base.parallel import within
from casckpt.base.text import listed
from casckpt.errors import RankFailed

log = logging.getLogger(__name__)

FIRST = 30.0  # seconds from the beginning of a wait to the first warning,
NEXT = 300.0  # and from one warning to the next
HEARD_SECONDS = 5.0  # seconds that a failed rank waits for the others to read the reason
_LONGEST: Final = 0.25  # seconds between two polls of the store
_POLL: Final = 2e-5  # seconds that the store needs for one poll
_NAMED: Final = 8  # ranks
_END: Final = "\n"  # of the rank in a verdict


def late(ranks: Sequence[int], seconds: float, *, is_over: bool = False) -> str:
    """Return the warning that other ranks have been waiting for ``ranks`` for ``seconds``; the error if ``is_over``."""
    return (
        f"waited {seconds:.0f} s for rank{'s' * (len(ranks) > 1)} {listed(ranks, _NAMED)}: every rank of the process "
        f"group must make the same casckpt call, not only rank 0. {'' if is_over else 'The wait continues. '}To "
        "involve only one rank, use Store.save or Store.load with no_dist=True"
    )


def patience_alone(timeout: float) -> float:
    """Return for how many seconds rank 0 waits if no other rank comes, which most likely never will.

    The limit grows with the ``timeout`` of the process group, for programs that raise it.
    """
    return max(NEXT, timeout / 6)


@contextmanager
def announced(missing: Callable[[], Sequence[int]], tell: Callable[[str], bool], delay: float = 0.0) -> Iterator[None]:
    """Log a warning during a long wait for ``missing`` ranks. ``tell``: sends the warning to the other waiting ranks.

    It returns whether the wait goes on. ``delay``: additional seconds before the first warning.
    """
    over, lock, begun = Event(), Lock(), monotonic()

    def watch() -> None:
        pause = FIRST + delay
        while not over.wait(pause):
            pause = NEXT
            with lock:  # do not warn after the wait has ended
                ranks = [] if over.is_set() else missing()
                goes_on = bool(ranks) and tell(late(ranks, monotonic() - begun))
            if goes_on:
                log.warning("%s", late(ranks, monotonic() - begun))

    Thread(target=watch, name="casckpt-waiting", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()


@dataclass(frozen=True)
class Meeting:
    """A meeting of the ranks of one group in ``store``, a torch store. It works before the ranks are connected."""

    store: Any
    rank: int
    size: int

    def come(self, stage: str, seconds: float, problem: str = "") -> None:
        """Wait at most ``seconds`` until all ranks have reached ``stage``.

        ``problem``: the reason why this rank cannot continue. If any rank has a problem or has waited too long, all
        ranks raise the same RankFailed, including ranks that arrive later.
        """
        try:
            verdict = within(max(seconds, 0) + 2 * HEARD_SECONDS, lambda: self._verdict(stage, seconds, problem))
        except RuntimeError as error:  # the process that hosts the store died or was stopped: rank 0 or its launcher
            raise RankFailed(
                "rank 0 or the process that hosts the store of the process group died or was stopped: nothing was "
                f"saved or loaded. Restart the job ({str(error)[:200]})",
                rank=0,
            ) from error
        if verdict:
            who, _, text = verdict.partition(_END)
            raise RankFailed(text, rank=int(who))

    def _verdict(self, stage: str, seconds: float, problem: str) -> str:
        """Return the failed rank and the reason, one line each, or "" if all ranks have arrived."""
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
                is_alone = self.rank == 0 and len(absent) == self.size - 1 and waited >= patience_alone(seconds)
                if is_alone:
                    self.store.set(f"{stage}/problem", f"{absent[0]}{_END}{late(absent, waited, is_over=True)}")
                if waited >= seconds or is_alone:
                    self._decide(stage, [] if is_alone else absent or [self.rank])
                elif absent:
                    log.warning("%s", late(absent, waited))
            # short at first, because the ranks of a job arrive almost together, but many ranks share one store
            sleep(min(_LONGEST, max(waited / 10, self.size * _POLL)))
        verdict: str = store.get(key).decode()[1:]
        if verdict:
            self._let_all_hear(stage)
        return verdict

    def _decide(self, stage: str, absent: list[int]) -> None:
        """Set the verdict unless it is already set."""
        key = f"{stage}/problem"
        verdict = self.store.get(key).decode() if self.store.check([key]) else ""
        if absent:
            problem = verdict and f" ({verdict.partition(_END)[2]})"
            verdict = (
                f"{absent[0]}{_END}not all ranks joined the save or load (absent: [{listed(absent, _NAMED)}]): "
                f"every rank must make the call. Check the log of rank {absent[0]}, then restart the job{problem}"
            )
        self.store.compare_set(f"{stage}/verdict", "", f"={verdict}")

    def _absent(self, stage: str, ranks: Sequence[int]) -> list[int]:
        """Return the absent ranks. Makes few requests if few ranks are absent."""
        if self.store.check([f"{stage}/{rank}" for rank in ranks]):
            return []
        half = len(ranks) // 2
        return [*self._absent(stage, ranks[:half]), *self._absent(stage, ranks[half:])] if half else list(ranks)

    def _let_all_hear(self, stage: str) -> None:
        """Wait until the other arrived ranks have read the verdict, because the store may end with this process."""
        with suppress(RuntimeError):
            heard, end = self.store.add(f"{stage}/heard", 1), monotonic() + HEARD_SECONDS
            while heard < self.store.add(f"{stage}/came", 0) and monotonic() < end:
                sleep(0.01)
                heard = self.store.add(f"{stage}/heard", 0)
