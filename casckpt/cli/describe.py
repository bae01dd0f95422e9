"""Converts results to plain data for the JSON output, and warns about a run without checkpoints."""

from __future__ import annotations

import logging
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from casckpt.base.names import is_among

if TYPE_CHECKING:
    from casckpt.contents.checkpoint import Checkpoint
    from casckpt.store.store import Store
    from casckpt.store.types import Commit

log = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """Convert a result to plain data: fields by name, times as ISO 8601, durations in seconds, checkpoints by name."""
    from casckpt.contents.checkpoint import Checkpoint
    from casckpt.store.types import Commit

    if isinstance(value, Checkpoint | Commit):
        return brief(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


def brief(checkpoint: Checkpoint | Commit) -> dict[str, Any]:
    """Return a checkpoint's name, and whether a rewrite replaced its commit."""
    from casckpt.store.types import Commit

    name = {"id": checkpoint.id, "run": checkpoint.run, "step": checkpoint.step}
    is_old = isinstance(checkpoint, Commit) and checkpoint.is_old_places
    return name | {"replaced": True} if is_old else name


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a checkpoint from its commit and its save's statistics, without reading its manifest."""
    return brief(checkpoint) | {
        "created_at": checkpoint.created_at.isoformat(),
        "who": checkpoint.who,
        "ephemeral": checkpoint.ephemeral,
        "healthy": checkpoint.healthy,
        "health": _fields(checkpoint.commit.committed.health),
        "metrics": checkpoint.commit.committed.metrics,
        "lineage": checkpoint.commit.committed.lineage,
        "forgotten": checkpoint.forgotten,
        "forgotten_by": checkpoint.forgotten_by,
        "dropped": _fields(checkpoint.dropped),
        "replaced": checkpoint.replaced,
        "stats": asdict(checkpoint.stats),
    }


def _fields(record: Any) -> dict[str, Any] | None:
    return None if record is None else {name: getattr(record, name) for name in record.__struct_fields__}


def doubt(store: Store, *runs: str | None) -> list[str]:
    """Warn of each of ``runs``, names or patterns, that has no checkpoints, not even forgotten ones. Return these.

    They may be mistyped.
    """
    named = [run for run in runs if run is not None]
    there = {one.run for one in store.checkpoints(forgotten=True)} if named else set()
    unknown = [run for run in named if not any(is_among(one, run) for one in there)]
    for run in unknown:
        log.warning("%s", store.listing().about_run(run))
    return unknown
