"""casckpt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.base import ASYNC, LOAD, PART, RANKS, SAVE, Best, Part, Peer, missing
from benchmarks.values import ADAPTERS

if TYPE_CHECKING:
    import casckpt
    from benchmarks.peers.base import State


class Casckpt(Peer):
    """``verify``: compare what is loaded with its digests. ``frozen``: declare all but the adapters as unchanged."""

    name = "casckpt"
    durable = True
    best: ClassVar[Best] = {
        SAVE: ({},),
        LOAD: ({}, {"verify": False}),
        PART: ({}, {"verify": False}),
        ASYNC: ({},),
        RANKS: ({},),
    }

    def __init__(self, setting: Mapping[str, Any], threads: int) -> None:
        """See `Peer`."""
        super().__init__(dict(setting), threads)
        self._stores: dict[Path, casckpt.Store] = {}
        self._steps: dict[Path, int] = {}

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("casckpt.checkpoint.store", "casckpt.checkpoint.job", "casckpt.checkpoint.load")

    def save(self, state: State, folder: Path) -> Mapping[str, float]:
        """A step of a training: the store stays open from one to the next."""
        found = self._store(folder).save({"model": state}, **self._options(folder))
        return _figures(found)

    def start_save(self, state: State, folder: Path) -> Callable[[], object]:
        """See `Peer.start_save`."""
        return self._store(folder).save_async({"model": state}, **self._options(folder)).result

    def load(self, state: State, folder: Path) -> Mapping[str, float]:
        """As a job that starts: the store is opened anew."""
        return self._load({"model": state}, folder)

    def load_part(self, parts: Mapping[str, Part], folder: Path) -> Mapping[str, float]:
        """See `Peer.load_part`."""
        import casckpt

        shards = {
            name: casckpt.Shard(part.data, global_shape=part.shape, offset=part.offset, shape=tuple(part.data.shape))
            for name, part in parts.items()
        }
        return self._load({"model": shards}, folder)

    def _load(self, state: dict[str, Any], folder: Path) -> Mapping[str, float]:
        store = self._open(folder)
        store.load(state, "latest", verify=self.setting.get("verify", True))
        storage: Any = store.repository.storage  # a folder, which counts
        return {"bytes_asked": float(storage.counts.bytes_read)}

    def _options(self, folder: Path) -> dict[str, Any]:
        step = self._steps[folder] = self._steps.get(folder, -1) + 1
        options: dict[str, Any] = {"run": "bench", "step": step}
        if self.setting.get("frozen") and step:
            options["frozen"] = is_frozen
        return options

    def _store(self, folder: Path) -> casckpt.Store:
        if folder not in self._stores:
            self._stores.clear()  # of folders that are gone
            self._stores[folder] = self._open(folder)
        return self._stores[folder]

    @staticmethod
    def _open(folder: Path) -> casckpt.Store:
        import casckpt

        return casckpt.open(folder, cache_dir=folder.with_name(folder.name + ".cache"))


def is_frozen(key: str) -> bool:
    """Is this key of the backbone, and no adapter?"""
    return not key.startswith(f"model.{ADAPTERS}")


def _figures(saved: casckpt.Checkpoint) -> dict[str, float]:
    stats = saved.stats
    return {"blob_bytes": float(stats.bytes_written), "blobs": float(stats.blobs_written)}
