"""The schedule of a training loop's saves. Pure: a step goes in, a kind of checkpoint comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["permanent", "ephemeral"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """``every``: steps from one permanent checkpoint to the next. ``fixed``: steps that are saved in any case.

    ``ephemeral_every``: steps between checkpoints that go once a newer one is there. ``ephemeral_cooldown``: no
    ephemeral one within so many steps of the last checkpoint of any kind.
    """

    every: int | None = None
    fixed: frozenset[int] = frozenset()
    ephemeral_every: int | None = None
    ephemeral_cooldown: int | None = None

    @property
    def longest_gap(self) -> int | None:
        """The most steps from one that is due to the next; None if there is no end to it."""
        gaps = [] if self.every is None else [self.every]
        if self.ephemeral_every is not None:
            gaps.append(self.ephemeral_every + max((self.ephemeral_cooldown or 1) - 1, 0))
        return min(gaps, default=None)

    def due(self, step: int, last: int | None) -> Kind | None:
        """Give what is to be saved at ``step``. ``last``: the step of the newest checkpoint, None if there is none."""
        if step in self.fixed or (self.every is not None and step > 0 and step % self.every == 0):
            return "permanent"
        if self.ephemeral_every is None or step <= 0 or step % self.ephemeral_every:
            return None
        near = last is not None and self.ephemeral_cooldown is not None and 0 <= step - last < self.ephemeral_cooldown
        return None if near else "ephemeral"
