"""The checkpoints of one run, and the search for the newest one to resume from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from casckpt.base.names import similar
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import NotFound
from casckpt.ranks.agreement import check_same
from casckpt.ranks.ranks import Ranks, everyone
from casckpt.store.store import Store
from casckpt.store.types import Commit

log = logging.getLogger(__name__)


def newest(store: Store, run: str, step: int | None = None, *, tell: bool = False) -> Checkpoint | None:
    """Return the newest checkpoint of a run, or the one of ``step``; None if it does not exist.

    ``tell``: whether to log why. Raises NotFound if there is no store although there must be one; see ``create`` of
    `casckpt.open`.
    """
    try:
        return store.get(_ref(run, step))
    except NotFound as error:
        store.repository.is_there()  # a missing store is normal when a job first starts
        if tell:
            tell_missing(store, run, error)
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
        found = (newest_healthy(store, run) if healthy else None) or newest(store, run, step, tell=True)
        return everyone(None if found is None else found.commit, ranks.size)

    commit = ranks.exchange(name, find)
    return None if commit is None else Checkpoint(store.repository, commit)


def tell_missing(store: Store, run: str, error: NotFound) -> None:
    """Log that nothing is resumed.

    This is a warning if the run's checkpoints are forgotten, or if a similar run or store exists, because of typos.

    ``error``: why a checkpoint was not found.
    """
    if store.exists():
        runs = store.runs()
        is_odd = run not in runs and (similar(run, runs) or store.checkpoints(run, forgotten=True))
        log.log(logging.WARNING if is_odd else logging.INFO, "nothing is resumed: %s", error)
    elif near := " or ".join(store.repository.similar()):
        log.warning("there is no store at %s, so nothing is resumed; did you mean %s?", store.url, near)
    else:
        log.info("there is no store at %s yet, so nothing is resumed; the first save creates it", store.url)


def _ref(run: str, step: int | None) -> str:
    return f"{run}@{'latest' if step is None else step}"
