"""The values of the model: its size, and the contents of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tests.support.tally import tally

Names = frozenset[str]
NOTHING: Names = frozenset()
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """The size of a model.

    - ``runs``: the number of runs of each gc.
    - ``toggles``: how many times the user forgets or restores a checkpoint.
    - ``contents``: the number of blobs of a checkpoint, 1 or 2.
    - ``retry``: a rejected writer tries once more.
    - ``resume``: a gc that timed out leaves its state for the next run.
    - ``pages``: a listing takes two steps.
    - ``reads``: manifests are read one at a time, instead of together with the listing.
    - ``duplicates``: PUTs may arrive a second time, late.
    - ``purger``: a separate process purges forgotten commits at any time, as the first step of a second gc would.
    - ``late_start``: the store is empty except for the uploads of the first writer, which is about to commit.
    - ``shared``: the writers copy one checkpoint in one transaction, and the first of their manifests is used.
    - ``logs``: a writer reads the list of commits at any time, even before it begins, and later the log of the commit
      that it reuses.
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
    names: Names  # the manifest and the blobs

    @property
    def committed(self) -> bool:
        return self.state != "revoked"

    @property
    def live(self) -> bool:
        return self.state in ("live", "forgotten")


Logs = tuple[tuple[str, Log], ...]


class Writer(NamedTuple):
    """A writer. ``refs``: the objects that this save will name. ``unread``: manifests that it still has to read."""

    pc: int = 0
    attempt: int = 0
    refs: Names = NOTHING
    unread: Names = NOTHING
    listed: Logs = ()
    sent: Names = NOTHING


class Gc(NamedTuple):
    """A gc. ``seen``: the commits that its listing has returned so far."""

    pc: str = "idle"
    runs: int = 0
    candidates: Names = NOTHING
    purged: Names = NOTHING
    waits: Names = NOTHING
    seen: Logs = ()
    unread: Names = NOTHING
    again: bool = False


class Kept(NamedTuple):
    """The state that a gc leaves in its cache when it times out."""

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
    manifests: tuple[tuple[str, Names], ...] = ()  # manifests of shared transactions


class Step(NamedTuple):
    label: str
    state: State


@dataclass
class Verdict:
    """The result. ``outcome``: SAFE, UNSAFE, VACUOUS or LIMIT. ``trace``: the steps that lead to the loss."""

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
