"""The results of saves: the summary of a save, and background failures that the next save raises."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, InvalidInput, Revoked
from casckpt.plan.retention import Rotation

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
    of them that cannot be restored.
    """

    checkpoint: Checkpoint
    blocked: float
    durable: float
    waits: tuple[float, float] = (0.0, 0.0)
    bytes_copied: int = 0
    forgotten: tuple[int, ...] = ()
    purged: tuple[int, ...] = ()

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
        """The figures of the save's `CheckpointEvent`, without ``bytes_hashed`` if the manifest cannot be read."""
        stats, hashed = self.checkpoint.stats, dict[str, float]()
        with suppress(CasckptError):  # the save has succeeded
            hashed["bytes_hashed"] = self.checkpoint.bytes_hashed
        return {
            "blocked_seconds": self.blocked, "waited_seconds": sum(self.waits), "ranks_seconds": self.waits[1],
            "durable_seconds": self.durable, "bytes_total": stats.bytes_total, "bytes_copied": self.bytes_copied,
            **hashed, "bytes_written": stats.bytes_written, "bytes_reused": stats.bytes_reused,
        }  # fmt: skip

    def __str__(self) -> str:
        ckpt = self.checkpoint
        kind = " (ephemeral)" if ckpt.ephemeral else ""
        hidden = [step for step in self.forgotten if step not in self.purged]
        parts = [(verb, steps) for verb, steps in (("forgot", hidden), ("purged", self.purged)) if steps]
        gone = "".join(f"; {verb} {', '.join(f'{ckpt.run}@{step}' for step in steps)}" for verb, steps in parts)
        return (
            f"saved {ckpt.run}@{ckpt.step}{kind}: blocked {self.blocked:.2f} s, durable after {self.durable:.2f} s, "
            f"{self.bytes_new / _MIB:.1f} MiB new, {self.bytes_reused / _MIB:.1f} MiB reused{gone}"
        )
