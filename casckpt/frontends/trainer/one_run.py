"""Looking at the checkpoints of one run. What saves and loads them is a `Checkpointer`."""

from __future__ import annotations

from collections.abc import Iterator

from casckpt.checkpoint.handle import Checkpoint
from casckpt.errors import NotFound
from casckpt.frontends.trainer.newest import newest
from casckpt.store.store import Store


class OneRun:
    """The checkpoints of a run, as one process finds them."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run = store, run

    def find_checkpoints(self, ephemeral: bool | None = None) -> Iterator[Checkpoint]:
        """The checkpoints of the run by step; ``ephemeral``: only those that are, or are not. From one listing."""
        try:
            found = self.store.checkpoints(self.run)
        except NotFound:  # no store yet
            found = []
        chosen = (one for one in found if ephemeral is None or one.ephemeral == ephemeral)
        yield from sorted(chosen, key=lambda one: one.step)

    def latest_checkpoint(self) -> Checkpoint:
        """The newest of the run: the one that was begun last. Raises NotFound, a FileNotFoundError."""
        return self.store.get(f"{self.run}@latest")

    def contains_checkpoint(self) -> bool:
        """Tell whether there is any of the run."""
        return newest(self.store, self.run) is not None

    @staticmethod
    def checkpoint_dirname(step: int) -> str:
        """A name for frameworks that demand a folder."""
        return f"step{step}"
