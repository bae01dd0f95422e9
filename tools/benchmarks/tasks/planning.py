"""The plan that rank 0 makes of what all ranks told it, for ranks that do not exist."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measure import Measured, Meter
from benchmarks.tasks.storing import Skipped
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here

_COLUMNS = 1024
_GROUP = 8  # ranks of one sharding group of "hsdp"
_CELL = 1 << 20
_BYTES_OF_AN_ITEM = 3000  # about what one item of a DCP plan takes, unpickled
_Rows = list[tuple[int, int, int]]


def _rows(kind: str, ranks: int, tensors: int, rank: int) -> _Rows:
    """(rows of the tensor, first row, row behind the last) of each tensor of a rank."""
    draw = np.random.default_rng(1)
    shards = {"replicas": 1, "shards": ranks, "hsdp": min(_GROUP, ranks)}[kind]
    factors = draw.integers(1, 9, size=tensors)
    number = rank % shards
    return [(int(f) * shards, int(f) * number, int(f) * (number + 1)) for f in factors]


def ours(here: Here, kind: str, ranks: int, tensors: int) -> Measured:
    """`casckpt.checkpoint.layout.plan_writes` on layouts as they arrive from the ranks."""
    from casckpt.checkpoint.layout import plan_writes

    layouts = [_arrived(_layout, kind, ranks, tensors, rank) for rank in range(ranks)]
    meter = Meter()
    plan = plan_writes(layouts)
    measured = meter.stop()
    written = sum(int(duty.elements.sum()) for duty in plan.duties)
    return _checked(measured, written, kind, ranks, tensors)


def dcp(here: Here, kind: str, ranks: int, tensors: int) -> Measured:
    """`DefaultSavePlanner.create_global_plan` on plans as they arrive from the ranks."""
    library: Any = import_module("torch.distributed.checkpoint")
    if ranks * tensors * _BYTES_OF_AN_ITEM > _available():
        raise Skipped("its plans would not fit into the memory")
    plans = [_arrived(_save_plan, kind, ranks, tensors, rank) for rank in range(ranks)]
    planner = library.DefaultSavePlanner()
    meter = Meter()
    found, _ = planner.create_global_plan(plans)
    measured = meter.stop()
    written = sum(item.tensor_data.chunk.sizes.numel() for plan in found for item in plan.items)
    return _checked(measured, written, kind, ranks, tensors)


def _checked(measured: Measured, written: int, kind: str, ranks: int, tensors: int) -> Measured:
    """The plan, if it writes every element once."""
    wanted = sum(rows * _COLUMNS for rows, _, _ in _rows(kind, ranks, tensors, 0))
    if written != wanted:
        raise WrongBytes(f"the plan writes {written} elements instead of {wanted}")
    return measured


def _arrived(make: Callable[..., Any], *arguments: Any) -> Any:
    return pickle.loads(pickle.dumps(make(*arguments)))  # noqa: S301 - made here


def _layout(kind: str, ranks: int, tensors: int, rank: int) -> Any:
    from casckpt.checkpoint.layout import Layout
    from casckpt.plan.writers import Held

    rows = _rows(kind, ranks, tensors, rank)
    streams: list[Any] = [
        (("tensor", f"model.layers.{i}.weight", 0, None), "float32", (whole, _COLUMNS))
        for i, (whole, _, _) in enumerate(rows)
    ]
    lo, hi = (np.array([row[i] * _COLUMNS for row in rows], dtype=np.int64) for i in (1, 2))
    held = Held(
        name=np.arange(tensors, dtype=np.uint64),
        region=lo.astype(np.uint64),
        lo=lo,
        hi=hi,
        cell=np.full(tensors, _CELL // 4, dtype=np.int64),
        itemsize=np.full(tensors, 4, dtype=np.int64),
        shared=np.ones(tensors, dtype=bool),
    )
    return Layout(streams, list(range(tensors)), held, b"")


def _save_plan(kind: str, ranks: int, tensors: int, rank: int) -> Any:
    from torch.distributed.checkpoint.planner import SavePlan

    rows = _rows(kind, ranks, tensors, rank)
    items = [_item(f"model.layers.{i}.weight", *row, sharded=kind != "replicas") for i, row in enumerate(rows)]
    return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def _item(key: str, whole: int, lo: int, hi: int, *, sharded: bool) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    offsets = torch.Size((lo, 0))
    return WriteItem(
        index=MetadataIndex(key, offsets),
        type=WriteItemType.SHARD if sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((hi - lo, _COLUMNS))),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size((whole, _COLUMNS)),
        ),
    )


def _available() -> int:
    import psutil

    return int(psutil.virtual_memory().available * 0.6)
