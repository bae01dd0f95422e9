"""torch_checkpointing (Meta)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.base import ASYNC, LOAD, RANKS, SAVE, Best, Peer, Setting, missing

if TYPE_CHECKING:
    from benchmarks.peers.base import State

_ITEM = "model"


class TorchCheckpointing(Peer):
    """Uses buffered I/O, because its direct I/O fails on sizes that are not a multiple of the block size.

    ``format``: "torch" or "safetensors". ``split``: two items, and therefore two files, which two threads write.
    ``async``: the state is staged in shared memory and written by a separate process. ``reshard``: write the metadata
    for loads on different ranks.
    """

    name = "torch_checkpointing"
    best: ClassVar[Best] = {
        SAVE: ({"format": "torch"}, {"format": "torch", "split": True}, {"format": "safetensors"}),
        LOAD: ({"format": "torch"}, {"format": "safetensors"}),
        ASYNC: ({"format": "torch", "async": True}, {"format": "torch", "async": True, "pinned": True}),
        RANKS: ({"format": "torch", "reshard": True},),
    }
    matters = ("format",)

    def __init__(self, setting: Setting, threads: int) -> None:
        """See `Peer`."""
        super().__init__(setting, threads)
        self._made: Any = None

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("torch_checkpointing")

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        self._manager().save(str(folder), self._items(state))

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`. It fills tensors in place."""
        self._manager().load(str(folder), into=self._items(state))

    def start_save(self, state: State, folder: Path) -> Callable[[], object]:
        """See `Peer.start_save`."""
        manager = self._manager()
        future = manager.save(str(folder), self._items(state))
        with manager.lock():  # the state must not change until staging has finished
            wait: Callable[[], object] = future.result
            return wait

    def close(self) -> None:
        """See `Peer.close`."""
        if self._made is not None:
            self._made.close()

    def _items(self, state: State) -> dict[str, Any]:
        if not self.setting.get("split"):
            return {_ITEM: state}
        names = sorted(state, key=lambda name: state[name].nbytes)
        return {f"{_ITEM}{i}": {name: state[name] for name in names[i::2]} for i in range(2)}

    def _manager(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> Any:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        writer = CheckpointWriterConfig(file_write_max_threads=2)
        save: Any = SyncCheckpointSaverConfig(writer_config=writer)
        if self.setting.get("async"):
            pinned = self.setting.get("pinned", False)
            staging = CheckpointStagerConfig(use_pinned_memory=pinned, use_non_blocking_copy=pinned)
            save = AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)
        return CheckpointManager(
            CheckpointManager.Config(
                items={_ITEM: self._spec()} if not self.setting.get("split") else {},
                save=save,
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def _spec(self) -> Any:
        from torch_checkpointing import ItemSpec
        from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
        from torch_checkpointing.default_resharder import DefaultResharder

        layout = None
        if self.setting["format"] == "safetensors":
            layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
        return ItemSpec(layout=layout, resharder=DefaultResharder() if self.setting.get("reshard") else None)
