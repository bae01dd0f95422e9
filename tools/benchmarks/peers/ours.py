"""casckpt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.measure import io_counts
from benchmarks.peers.base import (
    ASYNC,
    DCP_LOAD,
    DCP_PART,
    DCP_SAVE,
    LOAD,
    MAPPED,
    PART,
    RANKS,
    RESTART,
    SAVE,
    Best,
    Part,
    Peer,
    missing,
)
from benchmarks.peers.dcp import box_class
from benchmarks.values import ADAPTERS

if TYPE_CHECKING:
    import casckpt
    from benchmarks.peers.base import State


class Casckpt(Peer):
    """casckpt. ``verify``: verify digests in loads. ``kept``: load from a store that is already open.

    ``mapped``: read mapped tensors from a store that is already open, and copy them.
    ``frozen``: declare everything except the adapters as unchanged. ``cell_bytes``: the cell size of a new store.
    ``page_cache``: as in `casckpt.open`. ``through_dcp``: use `torch.distributed.checkpoint` with casckpt's storage
    writer and reader.
    """

    name = "casckpt"
    durable = True
    best: ClassVar[Best] = {
        SAVE: ({},),
        LOAD: ({}, {"verify": False}),
        MAPPED: ({"mapped": True},),
        PART: ({}, {"kept": True}, {"verify": False}),
        ASYNC: ({},),
        RANKS: ({}, {"verify": False}),
        RESTART: ({}, {"page_cache": True}, {"page_cache": False}),
        DCP_SAVE: ({"through_dcp": True},),
        DCP_LOAD: ({"through_dcp": True}, {"through_dcp": True, "verify": False}),
        DCP_PART: ({"through_dcp": True}, {"through_dcp": True, "verify": False}),
    }

    def __init__(self, setting: Mapping[str, Any], threads: int) -> None:
        """See `Peer`."""
        super().__init__(dict(setting), threads)
        self._stores: dict[Path, casckpt.Store] = {}
        self._steps: dict[Path, int] = {}

    @classmethod
    def verifies(cls, setting: Mapping[str, Any]) -> bool:
        """See `Peer.verifies`."""
        return bool(setting.get("verify", not setting.get("mapped")))

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing(
            "casckpt.saving.prepare", "casckpt.loading.load", "casckpt.upkeep.copies.copy", "casckpt.upkeep.gc.gc"
        )

    def save(self, state: State, folder: Path) -> Mapping[str, float]:
        """Save as a training step does: the store remains open between steps."""
        if self.setting.get("through_dcp"):
            return self._save_through_dcp(state, folder)
        found = self._store(folder).save({"model": state}, **self._options(folder))
        return _figures(found)

    def _save_through_dcp(self, state: State, folder: Path) -> Mapping[str, float]:
        from torch.distributed.checkpoint.state_dict_saver import save

        from casckpt.frontends.dcp import StorageWriter

        store = self._store(folder)
        save({"model": state}, storage_writer=StorageWriter(store, **self._options(folder)))
        return _figures(store.get("latest"))

    def start_save(self, state: State, folder: Path) -> Callable[[], object]:
        """See `Peer.start_save`."""
        return self._store(folder).save_async({"model": state}, **self._options(folder)).result

    def load(self, state: State, folder: Path) -> Mapping[str, float]:
        """Load as a job does when it starts: the store is reopened. Mapped tensors are copied, as for other peers."""
        if self.setting.get("mapped"):
            found = self._store(folder).read("latest", mapped=True)["model"]
            for name, tensor in state.items():
                tensor.copy_(found[name])
            return {}
        return self._load({"model": state}, folder)

    def load_part(self, parts: Mapping[str, Part], folder: Path) -> Mapping[str, float]:
        """See `Peer.load_part`."""
        import casckpt

        if self.setting.get("through_dcp"):
            box: Any = box_class()
            return self._load({"model": {name: box(part) for name, part in parts.items()}}, folder)
        shards = {
            name: casckpt.Shard(part.data, global_shape=part.shape, offset=part.offset, shape=tuple(part.data.shape))
            for name, part in parts.items()
        }
        return self._load({"model": shards}, folder)

    def _load(self, state: dict[str, Any], folder: Path) -> Mapping[str, float]:
        store = self._store(folder) if self.setting.get("kept") else self._open(folder)
        counts = io_counts(store.repository.storage)
        before, verify = counts.bytes_read, self.verifies(self.setting)
        if self.setting.get("through_dcp"):
            from torch.distributed.checkpoint.state_dict_loader import load

            from casckpt.frontends.dcp import StorageReader

            load(state, storage_reader=StorageReader(store, "latest", verify=verify))
        else:
            store.load(state, "latest", verify=verify)
        return {"bytes_asked": float(counts.bytes_read - before)}

    def _options(self, folder: Path) -> dict[str, Any]:
        step = self._steps[folder] = self._steps.get(folder, -1) + 1
        options: dict[str, Any] = {"run": "bench", "step": step}
        if self.setting.get("frozen") and step:
            options["frozen"] = is_frozen
        return options

    def _store(self, folder: Path) -> casckpt.Store:
        if folder not in self._stores:
            for removed in [known for known in self._stores if not known.exists()]:
                del self._stores[removed]
            self._stores[folder] = self._open(folder)
        return self._stores[folder]

    def _open(self, folder: Path) -> casckpt.Store:
        import casckpt

        chosen = {name: value for name, value in self.setting.items() if name == "page_cache"}
        store = casckpt.open(folder, cache_dir=folder.with_name(folder.name + ".cache"), **chosen)
        if "cell_bytes" in self.setting:
            store.repository.create(cell_bytes=self.setting["cell_bytes"])
        return store


def is_frozen(key: str) -> bool:
    """Return whether this key belongs to the backbone rather than to an adapter."""
    return not key.startswith(f"model.{ADAPTERS}")


def _figures(saved: casckpt.Checkpoint) -> dict[str, float]:
    stats = saved.stats
    return {"blob_bytes": float(stats.bytes_written), "blobs": float(stats.blobs_written)}
