"""Checkpoints as plain data, as the JSON output shows them, and what is said of a run that has none."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from casckpt.checkpoint.handle import Checkpoint
    from casckpt.repository.repository import Repository

log = logging.getLogger(__name__)


def brief(checkpoint: Checkpoint) -> dict[str, Any]:
    """What names a checkpoint."""
    return {"id": checkpoint.id, "run": checkpoint.run, "step": checkpoint.step}


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """What its commit says, and what its save did. Reads no manifest."""
    return brief(checkpoint) | {
        "created_at": checkpoint.created_at.isoformat(),
        "ephemeral": checkpoint.ephemeral,
        "forgotten": checkpoint.forgotten,
        "stats": asdict(checkpoint.stats),
    }


def doubt(repo: Repository, run: str) -> None:
    """Say so, if nothing of ``run`` is there, not even forgotten: it may be a slip of the pen."""
    from casckpt.repository.commits import list_commits
    from casckpt.repository.refs import about_run

    commits = list_commits(repo)
    if all(commit.run != run for commit in commits.live()):
        log.warning("%s", about_run(repo, commits, run))
