"""OLMo-core: the early checkpointer (0.1.0) and the trainer's checkpointer (3.0.0), each in its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.base import LOAD, RANKS, SAVE, Best, Peer, missing

if TYPE_CHECKING:
    from benchmarks.peers.base import State


class Olmo1(Peer):
    """Release 0.1.0. Its NaN check is off, as it is in its own loads."""

    name = "olmo-0.1.0"
    environment = "olmo-0.1.0"
    best: ClassVar[Best] = {SAVE: ({},), LOAD: ({},), RANKS: ({},)}

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("olmo_core.distributed.checkpoint")

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        _mend_for_this_torch()
        from olmo_core.distributed.checkpoint import Checkpointer

        Checkpointer().save(folder, dict(state))

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`."""
        _mend_for_this_torch()
        from olmo_core.distributed.checkpoint import Checkpointer

        Checkpointer().load(folder, dict(state))


class Olmo3(Peer):
    """Release 3.0.0. ``threads``: the number of threads of its writer and reader."""

    name = "olmo-3.0.0"
    environment = "olmo-3.0.0"
    best: ClassVar[Best] = {
        SAVE: ({"threads": 1}, {"threads": 2}),
        LOAD: ({"threads": 1}, {"threads": 2}),
        RANKS: ({"threads": 2},),
    }
    matters = ("threads",)

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("olmo_core.distributed.checkpoint")

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        from olmo_core.distributed.checkpoint import save_state_dict

        threads = self.setting["threads"]
        save_state_dict(folder, {"model": state}, thread_count=threads, enable_plan_caching=True)

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`."""
        from olmo_core.distributed.checkpoint import load_state_dict

        load_state_dict(folder, {"model": state}, thread_count=self.setting["threads"])


def _mend_for_this_torch() -> None:
    """Restore a private method of Shard that version 0.1.0 calls and that torch has since renamed."""
    from torch.distributed.tensor import Shard

    if hasattr(Shard, "_local_shard_size_on_dim"):
        return

    def delegate(size: int, chunks: int, rank: int, return_offset: bool = False) -> tuple[Any, int]:
        found, offset = Shard.local_shard_size_and_offset(size, chunks, rank)
        return found, (offset if return_offset else -1)

    Shard._local_shard_size_on_dim = staticmethod(delegate)  # type: ignore[attr-defined]  # a private method of torch
