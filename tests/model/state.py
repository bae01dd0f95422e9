"""The values of the model: how large it is, and what a state holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tests.support.tally import tally

Names = frozenset[str]
NOTHING: Names = frozenset()
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """How large a model is. ``toggles``: times that the user forgets or restores something.

    ``contents``: 1 or 2. ``retry``: a refused writer tries once more. ``runs``: of each gc. ``resume``: a gc that ran
    out of time leaves its state for the next run. ``pages``: listings take two steps. ``reads``: manifests are read
    one by one, else with the listing. ``duplicates``: PUTs may arrive a second time, late. ``purger``: somebody else
    purges, at any time, what is forgotten: all that one gc sees of the first step of another. ``late_start``: the
    store is empty but for the uploads of the first writer, who is about to commit. ``shared``: the writers copy one
    checkpoint, in one transaction; of their manifests, the first one that is put stands. ``logs``: a writer learns at
    any time, before it has begun too, what there is, and reads the log of the one that it reuses after that.
    """

    writers: int = 1
    gcs: int = 1
    runs: int = 1
    toggles: int = 1
    contents: int = 1
    retry: bool = False
    resume: bool = False
    pages: bool = False
    reads: bool = False
    duplicates: bool = False
    purger: bool = False
    late_start: bool = False
    shared: bool = False
    logs: bool = False
    mutant: str = ""


class Log(NamedTuple):
    """The records of one transaction in commits/, folded. ``state``: live, forgotten, purged or revoked."""

    state: str
    names: Names  # manifest and blobs

    @property
    def committed(self) -> bool:
        return self.state != "revoked"

    @property
    def live(self) -> bool:
        return self.state in ("live", "forgotten")


Logs = tuple[tuple[str, Log], ...]


class Writer(NamedTuple):
    """``refs``: the objects that this save will name. ``unread``: manifests that it still has to read."""

    pc: int = 0
    attempt: int = 0
    refs: Names = NOTHING
    unread: Names = NOTHING
    listed: Logs = ()
    sent: Names = NOTHING


class Gc(NamedTuple):
    """``seen``: what its listing of commits has brought so far."""

    pc: str = "idle"
    runs: int = 0
    candidates: Names = NOTHING
    purged: Names = NOTHING
    waits: Names = NOTHING
    seen: Logs = ()
    unread: Names = NOTHING
    again: bool = False


class Kept(NamedTuple):
    """What a gc that ran out of time leaves in its cache."""

    candidates: Names
    purged: Names
    waits: Names


class State(NamedTuple):
    objects: Names
    logs: Logs
    files: Names  # under transactions/
    writers: tuple[Writer, ...]
    gcs: tuple[Gc, ...]
    toggles: int = 0
    kept: Kept | None = None
    manifests: tuple[tuple[str, Names], ...] = ()  # what those of shared transactions name


class Step(NamedTuple):
    label: str
    state: State


@dataclass
class Verdict:
    """``outcome``: SAFE, UNSAFE, VACUOUS or LIMIT. ``trace``: the steps that lead to the loss."""

    outcome: str
    states: int
    deleted: set[str]
    trace: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        tally("states of models", self.states)
        tally(f"models that are {self.outcome}")


def with_item(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def with_log(logs: Logs, tx: str, log: Log) -> Logs:
    return tuple(sorted({**dict(logs), tx: log}.items()))


def of(tx: str, what: str) -> str:
    return f"{tx}/{what}"
