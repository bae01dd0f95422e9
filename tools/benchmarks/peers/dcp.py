"""torch.distributed.checkpoint, with its own writer and with the writer for safetensors files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.base import (
    ASYNC,
    DCP_LOAD,
    DCP_PART,
    DCP_SAVE,
    LOAD,
    PART,
    RANKS,
    RESTART,
    SAVE,
    Best,
    Part,
    Peer,
    Setting,
    missing,
)

if TYPE_CHECKING:
    from benchmarks.peers.base import State

_LATE = {"sync": False}  # synced by the benchmark, several files at a time


class Dcp(Peer):
    """DCP. ``threads``: the writer threads, each with one file. ``sync``: DCP syncs the files.

    ``cache``: DCP keeps plans. ``hf``: use HuggingFaceStorageWriter, with one file for each thread. ``process``: a
    process performs asynchronous saves, staged in shared memory; otherwise, a thread does, staged in memory that is
    reused. ``pinned``: that memory is pinned.
    """

    name = "dcp"
    best: ClassVar[Best] = {
        SAVE: (
            {"threads": 1, "cache": True},
            {"threads": 2, "cache": True},
            {"threads": 2, "cache": True} | _LATE,
            {"threads": 2, "hf": True},
        ),
        LOAD: ({"threads": 2}, {"threads": 2, "hf": True}),
        RESTART: ({"threads": 2},),
        PART: ({"threads": 2}, {"threads": 2, "hf": True}),
        ASYNC: (
            {"threads": 2, "cache": True},
            {"threads": 2, "process": True},
            {"threads": 2, "cache": True, "pinned": True},
            {"threads": 2, "process": True, "pinned": True},
        ),
        RANKS: ({"threads": 1, "cache": True}, {"threads": 2, "cache": True}),
        DCP_SAVE: (
            {"threads": 1, "cache": True},
            {"threads": 2, "cache": True},
            {"threads": 2, "cache": True} | _LATE,
        ),
        DCP_LOAD: ({"threads": 2},),
        DCP_PART: ({"threads": 2},),
    }
    matters = ("threads", "hf")

    def __init__(self, setting: Setting, threads: int) -> None:
        """See `Peer`."""
        super().__init__(setting, threads)
        self._planner: Any = None
        self._stager: Any = None

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("torch.distributed.checkpoint")

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        dcp = _library()
        folder.mkdir(exist_ok=True)
        dcp.save(self._named(state), storage_writer=self._make_writer(state, folder), planner=self._plans())

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`."""
        dcp = _library()
        dcp.load(self._named(state), storage_reader=self._reader(folder))

    def load_part(self, parts: Mapping[str, Part], folder: Path) -> None:
        """See `Peer.load_part`. DCP accepts any object that describes its chunks as DTensor does."""
        dcp = _library()
        boxes: Any = {name: box_class()(part) for name, part in parts.items()}
        dcp.load(self._named(boxes), storage_reader=self._reader(folder))

    def start_save(self, state: State, folder: Path) -> Callable[[], object]:
        """See `Peer.start_save`."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        folder.mkdir()
        kind = AsyncCheckpointerType.PROCESS if self.setting.get("process") else AsyncCheckpointerType.THREAD
        found: Any = _library().async_save(
            self._named(state),
            storage_writer=self._make_writer(state, folder),
            planner=self._plans(),
            async_checkpointer_type=kind,
            async_stager=self._kept_stager(),
        )
        if hasattr(found, "staging_completion"):
            found.staging_completion.result()  # the state must not change before staging has finished
            found = found.upload_completion
        wait: Callable[[], object] = found.result
        return wait

    def close(self) -> None:
        """See `Peer.close`."""
        if self._stager is not None:
            self._stager.close()

    def _named(self, state: State) -> dict[str, Any]:
        return dict(state) if self.setting.get("hf") else {"model": state}

    def _plans(self) -> Any:
        if self._planner is None or not self.setting.get("cache"):
            self._planner = _library().DefaultSavePlanner(enable_plan_caching=self.setting.get("cache", False))
        return self._planner

    def _make_writer(self, state: State, folder: Path) -> Any:
        dcp = _library()
        threads = self.setting["threads"]
        if self.setting.get("hf"):
            files = _dealt_out(state, threads)
            return dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, thread_count=threads)
        return dcp.FileSystemWriter(folder, thread_count=threads, sync_files=self.setting.get("sync", True))

    def _reader(self, folder: Path) -> Any:
        dcp = _library()
        if self.setting.get("hf"):
            return dcp.HuggingFaceStorageReader(str(folder), thread_count=self.setting["threads"])
        return dcp.FileSystemReader(folder)

    def _kept_stager(self) -> Any:
        """Return a stager that copies into the same memory each time (for a process, into shared memory)."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        shared = self.setting.get("process", False)
        if shared:
            _open_group()

        if self._stager is None or not self._stager._state_dict_stager._deepcopy_dispatch:  # torch 2.11 clears it
            pinned = self.setting.get("pinned", False)
            self._stager = DefaultStager(StagingOptions(pinned, shared, False, pinned))
        return self._stager


def _library() -> Any:
    return import_module("torch.distributed.checkpoint")


def _open_group() -> None:
    """Create a process group with only this process. Without one, DCP does not start a process."""
    dist: Any = import_module("torch.distributed")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _dealt_out(state: State, files: int) -> dict[str, int]:
    """Assign tensors to files, which are numbered from 1 and have about the same size."""
    loads = [0] * files
    dealt: dict[str, int] = {}
    for name in sorted(state, key=lambda name: -state[name].nbytes):
        least = loads.index(min(loads))
        loads[least] += state[name].nbytes
        dealt[name] = least + 1
    return dealt


def box_class() -> Any:
    """Return the class of tensors that have memory for only one box. It is created when torch has been imported."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    class Box(torch.Tensor):
        part: Part

        @staticmethod
        def __new__(cls: type[Box], part: Part) -> Box:
            made: Box = torch.Tensor._make_wrapper_subclass(cls, torch.Size(part.shape), dtype=part.data.dtype)
            made.part = part
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
            raise NotImplementedError(f"a box has no {func}")

        def __create_write_items__(self, *_: Any) -> Any:
            raise NotImplementedError("a box can only be loaded")

        def __create_chunk_list__(self) -> Any:
            return [ChunkStorageMetadata(torch.Size(self.part.offset), self.part.data.size())]

        def __get_tensor_shard__(self, _: Any) -> Any:
            return self.part.data

    return Box
