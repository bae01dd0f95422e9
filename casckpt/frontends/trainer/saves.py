"""What becomes of saves: their summaries and events, failures that a later save raises, and the gc that follows."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from casckpt.base.text import listed
from casckpt.base.units import format_size
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, InvalidInput, Revoked
from casckpt.plan.retention import Rotation
from casckpt.store.store import Store

log = logging.getLogger(__name__)

PATIENCE = 15 * 60.0
"""How long saves may fail, in seconds, before a save runs in the foreground."""


def will_repeat(error: BaseException) -> bool:
    """Return whether the next save would also fail, because the error concerns the state, an argument or a step."""
    return isinstance(error, InvalidInput) or (isinstance(error, Conflict) and not isinstance(error, Revoked))


class Failures:
    """Counts the failed saves of one rank since the last successful save. ``clock``: returns seconds, and is never set.

    ``most``: the number of consecutive failures, over at least `PATIENCE`, that is too many; None for no limit.
    """

    def __init__(self, most: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._most, self._clock, self._first = most, clock, 0.0

    def note(self, error: BaseException | None) -> None:
        """Record the end of a save. ``error``: None if the checkpoint is durable."""
        if error is None:
            self.count = 0
            return
        if self.count == 0:
            self._first = self._clock()
        self.count += 1

    @property
    def too_many(self) -> bool:
        """Whether the next save must run in the foreground and raise its error."""
        if self._most is None or self.count < self._most:
            return False
        return self._clock() - self._first >= PATIENCE


def allowed(rotation: Rotation, saved: Checkpoint, metrics: object) -> Rotation:
    """Return ``rotation``, or an empty one if it names one of the ``metrics`` that the save has left out."""
    given = metrics if isinstance(metrics, Mapping) else {}
    left = sorted((rotation.metrics & given.keys()) - saved.metrics.keys())
    if not left:
        return rotation
    log.warning(
        "retention after the save of %s@%d removes nothing, because a rule names %s, which the save left out",
        saved.run, saved.step, listed(left),
    )  # fmt: skip
    return Rotation()


_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SaveSummary:
    """The cost of a save. ``blocked``: how long the training waited, in seconds.

    ``waits``: the parts of ``blocked`` before the save began: for the previous save, and for the other ranks.
    ``bytes_copied``: the size of rank 0's copy of its state.
    ``durable``: the seconds until the commit. ``bytes_new``: the bytes that all ranks wrote. ``bytes_reused``: the
    bytes that the store already held. ``forgotten``: the steps that retention forgot after the save. ``purged``: those
    of them that cannot be restored. ``bytes_free``: those of the store's disk after the save; None if unknown.
    """

    checkpoint: Checkpoint
    blocked: float
    durable: float
    waits: tuple[float, float] = (0.0, 0.0)
    bytes_copied: int = 0
    forgotten: tuple[int, ...] = ()
    purged: tuple[int, ...] = ()
    bytes_free: int | None = None

    @property
    def bytes_new(self) -> int:
        """The bytes of tensors that the save wrote."""
        return self.checkpoint.stats.bytes_written

    @property
    def bytes_reused(self) -> int:
        """The bytes of tensors that the store already held."""
        return self.checkpoint.stats.bytes_reused

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the save's `CheckpointEvent`, without ``bytes_hashed`` if the manifest cannot be read.

        ``bytes_free`` is also left out if it is unknown.
        """
        stats, hashed = self.checkpoint.stats, dict[str, float]()
        with suppress(CasckptError):  # the save has succeeded
            hashed["bytes_hashed"] = self.checkpoint.bytes_hashed
        return {
            "blocked_seconds": self.blocked, "waited_seconds": sum(self.waits), "ranks_seconds": self.waits[1],
            "durable_seconds": self.durable, "bytes_total": stats.bytes_total, "bytes_copied": self.bytes_copied,
            **hashed, "bytes_written": stats.bytes_written, "bytes_reused": stats.bytes_reused,
            **free_figure(self.bytes_free),
        }  # fmt: skip

    def __str__(self) -> str:
        ckpt = self.checkpoint
        kind = " (ephemeral)" if ckpt.ephemeral else ""
        hidden = [step for step in self.forgotten if step not in self.purged]
        parts = [(verb, steps) for verb, steps in (("forgot", hidden), ("purged", self.purged)) if steps]
        free = "" if self.bytes_free is None else f", {format_size(self.bytes_free)} free"
        gone = "".join(f"; {verb} {', '.join(f'{ckpt.run}@{step}' for step in steps)}" for verb, steps in parts)
        return (
            f"saved {ckpt.run}@{ckpt.step}{kind}: blocked {self.blocked:.2f} s, durable after {self.durable:.2f} s, "
            f"{self.bytes_new / _MIB:.1f} MiB new, {self.bytes_reused / _MIB:.1f} MiB reused{free}{gone}"
        )


def free_figure(bytes_free: int | None) -> dict[str, float]:
    """Return the figure of an event for the free bytes of the store's disk, if they are known."""
    return {} if bytes_free is None else {"bytes_free": bytes_free}


class Janitor:
    """Runs gc in a thread, one gc at a time.

    The gc does not wait for saves in progress. Blobs that these saves may need remain until the next gc.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._asked = store, dict[str, Future[int]]()
        self._queue: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[Store]]:
        return type(self), (self._store,)

    def ask(self, run: str) -> None:
        """Start a gc of ``run``, either now or after the current gc."""
        last = self._asked.get(run)
        if last is None or last.running() or last.done():  # otherwise, it has yet to begin
            self._queue = self._queue or ThreadPoolExecutor(1, thread_name_prefix="casckpt-gc")
            self._asked[run] = self._queue.submit(self.gc, run)

    def gc(self, run: str) -> int:
        """Run a gc of ``run`` in this thread. Return the number of freed bytes. Errors are only logged."""
        try:
            result = self._store.gc(run=run, wait=0)
        except CasckptError as error:
            log.warning("gc of %s in %s failed; the next gc continues it: %s", run, self._store.url, error)
            return 0 if error.done is None else int(error.done.deleted_bytes)
        for one in result.refused:
            log.warning("gc left a file of run %s: %s (owner: %s)", one.run, one.why, one.owner)
        return result.deleted_bytes

    def close(self) -> None:
        """Wait until all gcs have finished."""
        if self._queue is not None:
            self._queue.shutdown()
            self._queue = None


_event_logger = logging.getLogger("casckpt.events")
if not _event_logger.level:  # the lines of JSON are for programs that ask for them
    _event_logger.setLevel(logging.WARNING)

EventKind: TypeAlias = Literal["saved", "failed", "skipped", "resumed", "forgotten"]


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """What happened to the checkpoint of ``run`` and ``step``.

    ``kind``: "saved": durable and visible. "failed": the save raised ``error``. "skipped": a due save was left out.
    "resumed": loaded by `Checkpointer.resume` or `Checkpointer.load`. "forgotten": by retention, after a save or to
    make room for one.
    ``checkpoint``: None for a failed or skipped save. ``reason``: why it failed or was skipped. ``figures``: numbers by
    name. Names that end in ``_seconds`` are times, and those that begin with ``bytes_`` are sizes over all ranks
    (``bytes_copied``: on rank 0; ``bytes_free``: of the store's disk).
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
        if _event_logger.isEnabledFor(logging.INFO):
            _event_logger.info("%s", json.dumps(event.as_dict()))
        if self._hook is None:
            return
        try:
            self._hook(event)
        except (Exception, SystemExit):
            if not self._has_failed:
                self._has_failed = True
                _event_logger.exception(
                    "on_event failed for the event %r of %s@%d. The checkpoint is not affected. Fix the function; "
                    "further errors are not logged", event.kind, event.run, event.step,
                )  # fmt: skip
