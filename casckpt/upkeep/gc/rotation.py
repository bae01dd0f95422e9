"""Rotation: forgets old checkpoints of a run after a save.

Rotation runs after the commit. Therefore, the newest checkpoint, tagged checkpoints and checkpoints at fixed steps can
always be loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

from casckpt.format.names import TxId
from casckpt.history.commits import Commit, list_commits
from casckpt.history.folding import kept_with
from casckpt.history.tags import FOREIGN_CLOCKS, tagged_txids, tags
from casckpt.plan.retention import Rotation, Thinning, newest_of, reasons_to_keep
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.purge import forget_and_purge, kept_of, trim_now
from casckpt.upkeep.saves import check_own
from casckpt.upkeep.thin import execute, plan_thin

log = logging.getLogger(__name__)
_WARN_EVERY = 10  # checkpoints


def plan_rotation(visible: Sequence[Commit], rotation: Rotation, tagged: Container[TxId], now: int) -> list[Commit]:
    """Return which of the ``visible`` checkpoints of one run to forget, oldest first.

    ``now``: the current time in microseconds. The newest checkpoint is the one that was saved last, even if the run was
    rolled back. If two checkpoints have the same step, the one saved last is kept.
    """
    if rotation.is_empty or not visible:
        return []
    current = sorted({commit.step: commit for commit in visible}.values(), key=lambda commit: commit.txid)
    permanent = [commit for commit in current if not commit.committed.ephemeral]
    keep = {commit.txid for commit in newest_of([*map(kept_of, current)])}
    keep |= {commit.txid for commit in current if commit.step in rotation.fixed}
    if rotation.keep is not None:
        keep |= reasons_to_keep(map(kept_of, permanent), rotation.keep, now).keys()
    if rotation.max_checkpoints is not None:
        counted = [commit for commit in permanent if commit.step not in rotation.fixed and commit.txid not in tagged]
        keep |= {commit.txid for commit in counted[-rotation.max_checkpoints :]}
    gone = {commit.txid for commit in visible if commit.txid not in keep and commit.txid not in tagged}
    gone -= {one for one, other in kept_with(visible).items() if other not in gone}
    return [commit for commit in visible if commit.txid in gone]


def rotate(repo: Repository, run: str, rotation: Rotation, among: Container[str] | None = None) -> list[Commit]:
    """Forget and purge the checkpoints of ``run`` that ``rotation`` does not keep, and return them.

    ``among``: the ids of the only checkpoints that may go; the rules count no others. None for all. Exactly one process
    must call this. The next gc frees the space. If the store's settings have a minimum age, gc purges the checkpoints
    instead. Checkpoints that are not yet safe in the mirror, or whose log has a record that cannot be read, are kept. A
    tag that is set in the meantime counts.
    Raises Damaged or Refused if a tag cannot be read, and StorageError.
    """
    if rotation.is_empty:
        return []
    listed = list_commits(repo)
    certain = (commit for commit in listed.visible() if commit.txid not in listed.damaged)
    visible = [commit for commit in certain if commit.run == run and (among is None or commit.id in among)]
    now = repo.clock()
    _warn_of_metrics(run, visible, rotation)
    if not plan_rotation(visible, rotation, (), now):  # tags can only keep more checkpoints
        return []
    check_own(repo, visible)
    tagged = tagged_txids(tags(repo, slack=FOREIGN_CLOCKS, listed=listed), visible)
    dropped = plan_rotation(visible, rotation, tagged, now)
    return forget_and_purge(repo, dropped)


def _warn_of_metrics(run: str, visible: Sequence[Commit], rotation: Rotation) -> None:
    """Warn at every tenth checkpoint if all checkpoints are kept because none of them has the ``keep_best`` metric."""
    permanent = [kept_of(one) for one in visible if not one.committed.ephemeral]
    if rotation.keep is None or not permanent or len(permanent) % _WARN_EVERY:
        return
    for best in rotation.keep.best:
        if not any(map(best.is_known_of, permanent)):
            message = "keep_best: none of the %d checkpoints of run %s has a number for %r, so all of them are kept"
            log.warning(message, len(permanent), run, best.metric)


def thin(repo: Repository, run: str, rule: Thinning | None, among: Container[str] | None = None) -> list[Commit]:
    """Thin the checkpoints of ``run`` by ``rule``, trim their old places, and return the new commits.

    ``among``: as for `rotate`. If the store's settings have a minimum age, gc trims them instead. Skips
    damaged checkpoints. Raises the errors of `rotate`.
    """
    if rule is None:
        return []
    plan = plan_thin(repo, drop=rule.drop, keep=rule.keep, run=run, among=among)
    if not plan.thin:
        return []
    made = execute(repo, plan)
    trim_now(repo, made)
    return list(made)
