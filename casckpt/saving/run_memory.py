"""What this process keeps of the runs that it saved last, for their next saves, whoever makes them.

It goes by store and run, not by who saves: some programs make a new DCP writer, or open the store anew, for each save.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from casckpt.format.sections.index import Name
from casckpt.repository.repository import Repository
from casckpt.saving.previous_cells import HeldCells
from casckpt.storage.forking import PerProcess

MAX_RUNS = 2
"""Of a process: the least recently saved are given up first."""


@dataclass
class PutRate:
    """How fast a storage took blobs, of those that were put beside each other. None of them: as fast as can be."""

    nbytes: int = 0
    seconds: float = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Take up how long a blob took."""
        self.nbytes, self.seconds = self.nbytes + nbytes, self.seconds + seconds

    @property
    def bytes_per_second(self) -> float:
        """Of one writer."""
        return self.nbytes / self.seconds if self.seconds else float("inf")


class Pause(NamedTuple):
    """How long a stream is left alone. ``until``: the number of the save that tries it again."""

    until: int
    saves: int


@dataclass
class Kept:
    """What is kept of one run. ``saves``: how many it was kept for.

    ``in_vain``: streams of which no cell that was tried was worth it.
    """

    rate: PutRate
    held: HeldCells = field(default_factory=HeldCells)
    saves: int = 0
    in_vain: dict[Name, Pause] = field(default_factory=dict)

    def pauses(self, name: Name) -> bool:
        """Tell whether a stream is left alone in this save."""
        found = self.in_vain.get(name)  # at once: another thread may take it out
        return found is not None and found.until > self.saves

    def pause(self, name: Name, saves: int, most: int) -> None:
        """Leave a stream alone for so many saves; for twice as many as the last time, up to ``most``, if it was."""
        last = self.in_vain.get(name)
        if last is None:
            self.in_vain[name] = Pause(self.saves + saves, saves)
        elif last.until <= self.saves:  # else another thread has just done this
            again = min(2 * last.saves, most)
            self.in_vain[name] = Pause(self.saves + again, again)


class _Runs:
    """By store and run."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()

    def of(self, store: str, run: str) -> Kept:
        with self._lock:
            if (store, run) not in self._kept:
                rates = (kept.rate for (other, _), kept in self._kept.items() if other == store)
                self._kept[store, run] = Kept(next(rates, None) or PutRate())
            self._kept.move_to_end((store, run))
            while len(self._kept) > MAX_RUNS:
                self._kept.popitem(last=False)
            return self._kept[store, run]

    def give_up(self, store: str, run: str) -> None:
        with self._lock:
            self._kept.pop((store, run), None)


_RUNS = PerProcess(_Runs)


def kept_of(repo: Repository, run: str) -> Kept:
    """Return what is kept of a run; the same for threads that ask at once."""
    return _RUNS.get().of(repo.marker.store_id, run)


def give_up(repo: Repository, run: str) -> None:
    """Keep nothing of a run any more."""
    _RUNS.get().give_up(repo.marker.store_id, run)
