"""Checkpoints as plain data, as the JSON output shows them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from casckpt.checkpoint.handle import Checkpoint


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
