"""What happened to the checkpoints of a training: events for a hook and for the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from casckpt.contents.checkpoint import Checkpoint

log = logging.getLogger("casckpt.events")
if not log.level:  # the lines of JSON are for programs that ask for them
    log.setLevel(logging.WARNING)

EventKind: TypeAlias = Literal["saved", "failed", "skipped", "resumed", "forgotten"]


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """What happened to the checkpoint of ``run`` and ``step``.

    ``kind``: "saved": durable and visible. "failed": the save raised ``error``. "skipped": a due save was left out.
    "resumed": loaded by `Checkpointer.resume` or `Checkpointer.load`. "forgotten": by retention, after a save.
    ``checkpoint``: None for a failed or skipped save. ``reason``: why it failed or was skipped. ``figures``: numbers by
    name. Names that end in ``_seconds`` are times, and those that begin with ``bytes_`` are sizes over all ranks
    (``bytes_copied``: on rank 0).
    """

    kind: EventKind
    run: str
    step: int
    checkpoint: Checkpoint | None = None
    error: BaseException | None = None
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name: ``event``, ``run``, ``step``, ``id`` (or None), ``reason``, and the figures."""
        id = None if self.checkpoint is None else self.checkpoint.id
        named = {"event": self.kind, "run": self.run, "step": self.step, "id": id, "reason": self.reason}
        return {**named, **self.figures}


OnEvent: TypeAlias = Callable[[CheckpointEvent], object]


def of_checkpoint(
    kind: EventKind, checkpoint: Checkpoint, figures: Mapping[str, float] | None = None
) -> CheckpointEvent:
    """Return an event about an existing checkpoint."""
    return CheckpointEvent(
        kind=kind, run=checkpoint.run, step=checkpoint.step, checkpoint=checkpoint, figures=figures or {}
    )


class Events:
    """Passes events to the log and to ``hook``. An error of the hook is logged once, and never raised."""

    def __init__(self, hook: OnEvent | None) -> None:
        self._hook, self._has_failed = hook, False

    def emit(self, event: CheckpointEvent) -> None:
        """Log the event as JSON on one line, and call the hook."""
        if log.isEnabledFor(logging.INFO):
            log.info("%s", json.dumps(event.as_dict()))
        if self._hook is None:
            return
        try:
            self._hook(event)
        except (Exception, SystemExit):
            if not self._has_failed:
                self._has_failed = True
                log.exception(
                    "on_event failed for the event %r of %s@%d. The checkpoint is not affected. Fix the function; "
                    "further errors are not logged", event.kind, event.run, event.step,
                )  # fmt: skip
