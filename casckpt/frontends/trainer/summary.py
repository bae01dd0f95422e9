"""The summary of a save in one line."""

from __future__ import annotations

from dataclasses import dataclass

from casckpt.contents.checkpoint import Checkpoint

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SaveSummary:
    """The cost of a save: ``blocked``: seconds that the training waited; ``durable``: seconds until the commit.

    ``bytes_new``: bytes that all ranks wrote; ``bytes_reused``: bytes that the store had. ``forgotten``: the steps that
    retention forgot after the save.
    """

    checkpoint: Checkpoint
    blocked: float
    durable: float
    forgotten: tuple[int, ...] = ()

    @property
    def bytes_new(self) -> int:
        """Bytes of tensors that were written."""
        return self.checkpoint.stats.bytes_written

    @property
    def bytes_reused(self) -> int:
        """Bytes of tensors that the store had."""
        return self.checkpoint.stats.bytes_reused

    def __str__(self) -> str:
        ckpt = self.checkpoint
        kind = " (ephemeral)" if ckpt.ephemeral else ""
        gone = f"; forgot {', '.join(f'{ckpt.run}@{step}' for step in self.forgotten)}" if self.forgotten else ""
        return (
            f"saved {ckpt.run}@{ckpt.step}{kind}: blocked {self.blocked:.2f} s, durable after {self.durable:.2f} s, "
            f"{self.bytes_new / _MIB:.1f} MiB new, {self.bytes_reused / _MIB:.1f} MiB reused{gone}"
        )
