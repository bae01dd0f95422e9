"""Saves and loads through torch.distributed.checkpoint, folders that torch writes, and a tensor in chunks."""

from __future__ import annotations

import enum
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tests.support.together import numbers

QUIET = "torch.distributed is"  # disabled, unavailable or uninitialized: these tests cause DCP's warning deliberately


def save(state: Any, writer: StorageWriter, **more: Any) -> Metadata:
    """Call `dcp.save` without its warning about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", QUIET)
        found: Metadata = save_state(state, storage_writer=writer, **more)
    return found


def load(state: Any, reader: StorageReader, **more: Any) -> Any:
    """Call `dcp.load`. Return the state that it filled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", QUIET)
        warnings.filterwarnings("ignore", "Please use DTensor instead")  # about ShardedTensor
        load_state(state, storage_reader=reader, **more)
    return state


def failure(call: Callable[[], Any]) -> CheckpointException:
    """Return the CheckpointException of a call. It is not an Exception, so `outcomes` would not catch it."""
    try:
        call()
    except CheckpointException as error:
        return error
    raise AssertionError("nothing failed")


def causes(error: CheckpointException) -> dict[int, BaseException]:
    """Return the failures of all ranks."""
    return {rank: cause for rank, (cause, _) in error.failures.items()}


def failed(call: Callable[[], Any]) -> dict[int, tuple[str, str]]:
    """Return (type, message) of each failure by rank, in a form that a different process can unpickle."""
    return {rank: (type(cause).__name__, str(cause)) for rank, cause in causes(failure(call)).items()}


def forget_plans() -> None:
    """Clear the plans that DCP caches in its classes, so that tests in one process do not share them."""
    for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan",
                 "_cached_metadata"):  # fmt: skip
        getattr(SavePlanner, name, {}).clear()


def zeros(state: Any) -> Any:
    """Return a state with the same structure, filled with zeros."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return [zeros(value) for value in state] if isinstance(state, list) else None


PLAIN: dict[str, Any] = {
    "step": 7, "loss": 0.25, "nan": float("nan"), "name": "x", "flags": [True, None], "pair": (1, "b"),
    "big": 1 << 80, "array": np.arange(3000, dtype=np.int16), "scalar": np.float32(2), "size": torch.Size((1, 2)),
    "dtype": torch.bfloat16, "bytes": b"y" * 9000, "ordered": OrderedDict(a=1), "path": Path("a/b"),
}  # fmt: skip


class Colour(enum.Enum):
    """A class that torch's restricted unpickler does not know."""

    RED = 1


def example() -> dict[str, Any]:
    return {
        "model": {"w": numbers("w", 300, 100), "half": numbers("half", 7).bfloat16(), "scalar": torch.tensor(3)},
        "optim": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "empty": torch.zeros(0, 4), "pair": (torch.ones(3), "x"), "none": None, "list": [1, 2],
        "complex": torch.ones(2) * 1j,
    }  # fmt: skip


def stock(path: Path, state: Any) -> Path:
    """Write a state as a DCP folder, with torch's own writer."""
    save(state, FileSystemWriter(path))
    return path


def stringed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as DCP returns it, with string keys."""
    found = dict(state)
    found["optim"] = {**state["optim"], "state": {str(k): v for k, v in state["optim"]["state"].items()}}
    return found


def half(rows: int = 2, key: str = "a") -> Chunks:
    """Return a 4 x 2 tensor, of which this process holds the first ``rows`` rows."""
    return Chunks(torch.Size((4, 2)), {(0, 0): numbers(key, rows, 2)})


class Chunks(torch.Tensor):
    """A tensor that reports its chunks to DCP, as DTensor does."""

    held: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(cls: type[Chunks], shape: torch.Size, held: dict[tuple[int, ...], torch.Tensor]) -> Chunks:
        made: Chunks = torch.Tensor._make_wrapper_subclass(cls, shape)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # torch's own is typed as a function
        raise NotImplementedError(f"{func} of something that is only saved and loaded")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, at),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(data), self.size()),
            )
            for chunk, (at, data) in zip(self.__create_chunk_list__(), self.held.items(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), data.size()) for at, data in self.held.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.held[tuple(index.offset or ())]
