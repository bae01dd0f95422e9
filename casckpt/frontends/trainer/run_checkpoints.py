"""The checkpoints of one run, and the search for the newest one to resume from."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from casckpt.base.names import similar_runs
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import NotFound
from casckpt.frontends.stores import as_store
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import Ranks, everyone
from casckpt.store.store import Store
from casckpt.store.types import Commit

log = logging.getLogger(__name__)


def newest(store: Store, run: str, step: int | None = None) -> Checkpoint | None:
    """Return the newest checkpoint of a run, or the one of ``step``; None if it does not exist.

    Raises NotFound if there is no store although there must be one; see ``create`` of `casckpt.open`.
    """
    try:
        return store.get(_ref(run, step))
    except NotFound as error:
        if store.repository.is_there():  # a missing store is normal when a job first starts
            log.info("%s", error)  # logged because a typo would start a new training run
        return None


def newest_healthy(store: Store, run: str) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is not unhealthy; None if the run is empty.

    Raises NotFound if all are unhealthy, and in the cases of `newest`.
    """
    found = store.checkpoints(run) if store.repository.is_there() else []
    healthy = [one for one in found if one.healthy is not False]
    if found and not healthy:
        raise NotFound(f"all checkpoints of {run} were saved with healthy=False; to load one of them, name its step")
    return healthy[-1] if healthy else None


def newest_together(
    ranks: Ranks,
    store: Store,
    run: str,
    step: int | None = None,
    *,
    healthy: bool = False,
    check: Callable[[], object] = lambda: None,
) -> Checkpoint | None:
    """Return the newest checkpoint that rank 0 finds, on all ranks.

    ``check``: a function that each rank calls. All ranks raise its errors. Raises Conflict if the ranks name different
    runs or steps.
    """

    def name() -> str:
        check()
        return f"{_ref(run, step)}{', healthy' * healthy}"

    def find(named: Sequence[str]) -> Sequence[Commit | None]:
        check_same(named)
        found = newest_healthy(store, run) if healthy else newest(store, run, step)
        if found is None and step is None:
            warn_of_similar(store, run)
        return everyone(None if found is None else found.commit, ranks.size)

    commit = ranks.exchange(name, find)
    return None if commit is None else Checkpoint(store.repository, commit)


def warn_of_similar(store: Store, run: str) -> None:
    """Log runs or stores with similar names, because a typo would start the training from scratch."""
    is_there, folder = store.exists(), getattr(store.repository.storage, "path", None)
    if is_there:
        what, similar = f"checkpoint of run {run!r} in", [f"run {name!r}" for name in similar_runs(run, store.runs())]
    else:
        what, similar = "store at", _similar_folders(folder) if isinstance(folder, Path) else []
    if similar:
        log.warning("there is no %s %s, so nothing is resumed; did you mean %s?", what, store.url, " or ".join(similar))
    elif not is_there:
        log.info("there is no store at %s yet, so nothing is resumed; the first save creates it", store.url)


def _similar_folders(path: Path) -> list[str]:
    """Return the stores whose path differs from ``path`` only in the spelling of its first missing folder.

    A name with a different number does not count as a different spelling.
    """
    with suppress(OSError):
        first = next((one for one in (*path.parents[::-1], path) if not one.exists()), path)
        close = difflib.get_close_matches(first.name, os.listdir(first.parent), cutoff=0.85)
        names = [name for name in close if name != first.name and _digits(name) == _digits(first.name)]
        named = [first.parent / name / path.relative_to(first) for name in names]
        return [str(one) for one in named if as_store(one).exists()]
    return []


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _ref(run: str, step: int | None) -> str:
    return f"{run}@{'latest' if step is None else step}"
