"""The checkpoints of one run, and the newest of them, which all ranks are to take up again."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from casckpt.base.names import similar_runs
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import NotFound
from casckpt.format.keys import MARKER
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import Ranks, everyone
from casckpt.store.store import Store
from casckpt.store.types import Commit

log = logging.getLogger(__name__)


def newest(store: Store, run: str, step: int | None = None) -> Commit | None:
    """The newest of a run, or that of a step; None if there is none."""
    try:
        return store.get(_ref(run, step)).commit
    except NotFound as error:
        if store.exists():  # else it is the first run of all
            log.info("%s", error)  # a slip of the pen would start a training anew
        return None


def newest_healthy(store: Store, run: str) -> Commit | None:
    """The newest of a run that nobody called unhealthy; None if there is none. Raises NotFound if all are unhealthy."""
    found = store.checkpoints(run) if store.exists() else []
    healthy = [one.commit for one in found if one.healthy is not False]
    if found and not healthy:
        raise NotFound(f"all checkpoints of {run} were saved with healthy=False; load one of them by its step")
    return healthy[-1] if healthy else None


def newest_together(
    ranks: Ranks, store: Store, run: str, step: int | None, check: Callable[[], None], *, healthy: bool
) -> Checkpoint | None:
    """`newest` as rank 0 finds it. ``check``: called on each rank; what it raises, all raise.

    Raises Conflict if ranks name another run or step.
    """

    def name() -> str:
        check()
        return f"{_ref(run, step)}{', healthy' * healthy}"

    def find(named: Sequence[str]) -> Sequence[Commit | None]:
        check_same(named)
        found = newest_healthy(store, run) if healthy else newest(store, run, step)
        if found is None and step is None:
            warn_of_similar(store, run)
        return everyone(found, ranks.size)

    commit = ranks.exchange(name, find)
    return None if commit is None else Checkpoint(store.repository, commit)


def warn_of_similar(store: Store, run: str) -> None:
    """Log that a run, or a folder, of another name may be meant, as one with a typo: a training begins anew."""
    is_there, folder = store.exists(), getattr(store.repository.storage, "path", None)
    if is_there:
        what, similar = f"checkpoint of run {run!r} in", [f"run {name!r}" for name in similar_runs(run, store.runs())]
    else:
        what, similar = "store at", _similar_folders(folder) if isinstance(folder, Path) else []
    if similar:
        log.warning("there is no %s %s, so nothing is resumed; did you mean %s?", what, store.url, " or ".join(similar))
    elif not is_there:
        log.info("there is no store at %s yet, so nothing is resumed; the first save makes it", store.url)


def _similar_folders(path: Path) -> list[str]:
    """The folders of stores whose path has another spelling of the first part of ``path`` that does not exist.

    Numbers are no typos.
    """
    with suppress(OSError):
        first = next((one for one in (*path.parents[::-1], path) if not one.exists()), path)
        close = difflib.get_close_matches(first.name, os.listdir(first.parent), cutoff=0.85)
        names = [name for name in close if name != first.name and _digits(name) == _digits(first.name)]
        named = [first.parent / name / path.relative_to(first) for name in names]
        return [str(one) for one in named if (one / MARKER).is_file()]
    return []


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _ref(run: str, step: int | None) -> str:
    return f"{run}@{'latest' if step is None else step}"


class RunCheckpoints:
    """The checkpoints of a run, as one process finds them. What saves and loads them is a `Checkpointer`."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run = store, run

    def find_checkpoints(self, ephemeral: bool | None = None) -> Iterator[Checkpoint]:
        """The checkpoints of the run by step; ``ephemeral``: only those that are, or are not. From one listing."""
        try:
            found = self.store.checkpoints(self.run)
        except NotFound:  # no store yet
            found = []
        chosen = (one for one in found if ephemeral is None or one.ephemeral == ephemeral)
        yield from sorted(chosen, key=lambda one: one.step)

    def latest_checkpoint(self) -> Checkpoint:
        """The newest of the run: the one that was begun last. Raises NotFound, a FileNotFoundError."""
        return self.store.get(f"{self.run}@latest")

    def contains_checkpoint(self) -> bool:
        """Tell whether there is any of the run."""
        return newest(self.store, self.run) is not None

    @staticmethod
    def checkpoint_dirname(step: int) -> str:
        """A name for frameworks that demand a folder."""
        return f"step{step}"
