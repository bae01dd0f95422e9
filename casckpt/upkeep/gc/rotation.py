"""Rotation: which checkpoints of a run go after a save, always once the new one is committed, never before.

So there is no instant at which fewer are loadable than the newest one, the tagged ones and those of fixed steps.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

from casckpt.format.names import TxId
from casckpt.history.commits import Commit, list_commits
from casckpt.history.tags import FOREIGN_CLOCKS, tagged_txids, tags
from casckpt.plan.retention import Rotation, Thinning, newest_of, plan_forget
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.purge import forget_and_purge, kept_of, purge_now
from casckpt.upkeep.thin import execute, plan_thin

log = logging.getLogger(__name__)
_TOLD_EVERY = 10  # checkpoints


def plan_rotation(visible: Sequence[Commit], rotation: Rotation, tagged: Container[TxId], now: int) -> list[Commit]:
    """Choose what goes of the ``visible`` checkpoints of one run, oldest first. Pure; ``now`` in microseconds.

    "Newest" is by time of the save: a run that was rolled back goes on from its latest one. Of two of one step the one
    saved last answers, and the other goes.
    """
    if rotation.is_empty or not visible:
        return []
    current = sorted({one.step: one for one in visible}.values(), key=lambda one: one.order)
    permanent = [one for one in current if not one.committed.ephemeral]
    keep = {one.txid for one in newest_of([*map(kept_of, current)])}
    keep |= {one.txid for one in current if one.step in rotation.fixed}
    if rotation.keep is not None:
        forgotten = {one.txid for one in plan_forget(map(kept_of, permanent), rotation.keep, now)}
        keep |= {one.txid for one in permanent} - forgotten
    if rotation.max_checkpoints is not None:
        counted = [one for one in permanent if one.step not in rotation.fixed and one.txid not in tagged]
        keep |= {one.txid for one in counted[-rotation.max_checkpoints :]}
    return [one for one in visible if one.txid not in keep and one.txid not in tagged]


def rotate(repo: Repository, run: str, rotation: Rotation) -> list[Commit]:
    """Forget and purge what ``rotation`` does not keep of ``run``; what was forgotten. One process does that.

    Its space is free with the next gc: a number of checkpoints to keep is about space. Where the settings of the store
    name a minimum age, the purge is left to a gc, which knows it. What is not safe in the store's mirror yet stays. A
    tag that is set meanwhile counts. Raises Damaged or Refused if a tag cannot be read, StorageError.
    """
    if rotation.is_empty:
        return []
    visible = [commit for commit in list_commits(repo).visible() if commit.run == run]
    now = repo.clock()
    _tell_of_metrics(run, visible, rotation)
    if not plan_rotation(visible, rotation, (), now):  # tags only ever keep more
        return []
    tagged = tagged_txids(tags(repo, slack=FOREIGN_CLOCKS), visible)
    chosen = plan_rotation(visible, rotation, tagged, now)
    return forget_and_purge(repo, chosen)


def _tell_of_metrics(run: str, visible: Sequence[Commit], rotation: Rotation) -> None:
    """Warn now and then where all stays for want of a metric, whose name may be mistyped."""
    permanent = [kept_of(one) for one in visible if not one.committed.ephemeral]
    if rotation.keep is None or not permanent or len(permanent) % _TOLD_EVERY:
        return
    for best in rotation.keep.best:
        if not any(map(best.is_known_of, permanent)):
            message = "keep_best: none of the %d checkpoints of run %s has a number for %r, so all of them stay"
            log.warning(message, len(permanent), run, best.metric)


def thin(repo: Repository, run: str, rule: Thinning | None) -> list[Commit]:
    """Leave out of the checkpoints of ``run`` what ``rule`` says, and purge their old places; what was thinned.

    Where the settings of the store name a minimum age, the purge is left to a gc. What is damaged stays as it is.
    Raises as `rotate`.
    """
    if rule is None:
        return []
    plan = plan_thin(repo, drop=rule.drop, keep=rule.keep, run=run)
    if not plan.thin:
        return []
    made = execute(repo, plan)
    purge_now(repo, [one.commit.txid for one in plan.thin])
    return list(made)
