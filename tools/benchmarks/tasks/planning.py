"""The plan that rank 0 computes from the messages of all ranks. The ranks are simulated."""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measure import Measured, Meter
from benchmarks.tasks.storing import Skipped
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here

_COLUMNS = 1024
_GROUP = 8  # ranks in a sharding group of "hsdp"
_CELL = 1 << 20
_BYTES_OF_AN_ITEM = 3000  # approximate size of an item in a DCP plan
_Rows = list[tuple[int, int, int]]


def _rows(kind: str, ranks: int, tensors: int, rank: int) -> _Rows:
    """Return (rows of the tensor, first row, end row) for each tensor of a rank."""
    draw = np.random.default_rng(1)
    shards = {"replicas": 1, "shards": ranks, "hsdp": min(_GROUP, ranks)}[kind]
    factors = draw.integers(1, 9, size=tensors)
    number = rank % shards
    return [(int(f) * shards, int(f) * number, int(f) * (number + 1)) for f in factors]


def ours(here: Here, kind: str, ranks: int, tensors: int) -> Measured:
    """Run `casckpt.saving.layout.plan_writes` on layouts as they arrive from the ranks."""
    from casckpt.saving.layout import plan_writes

    layouts = [_layout(kind, ranks, tensors, rank) for rank in range(ranks)]
    meter = Meter()
    plan = plan_writes(layouts)
    measured = meter.stop()
    written = sum(int(ranges.elements.sum()) for ranges in plan.ranges)
    return _checked(measured, written, kind, ranks, tensors)


def dcp(here: Here, kind: str, ranks: int, tensors: int) -> Measured:
    """Run `DefaultSavePlanner.create_global_plan` on plans as they arrive from the ranks."""
    library: Any = import_module("torch.distributed.checkpoint")
    if ranks * tensors * _BYTES_OF_AN_ITEM > _available():
        raise Skipped("its plans would not fit into memory")
    start = time.perf_counter()
    plans = _save_plans(kind, ranks, tensors)
    making = time.perf_counter() - start
    planner = library.DefaultSavePlanner()
    meter = Meter()
    found, _ = planner.create_global_plan(plans)
    measured = meter.stop()
    measured.extra["making"] = making
    written = sum(item.tensor_data.chunk.sizes.numel() for plan in found for item in plan.items)
    return _checked(measured, written, kind, ranks, tensors)


def _checked(measured: Measured, written: int, kind: str, ranks: int, tensors: int) -> Measured:
    """Check that the plan writes every element once. Return the measurement."""
    wanted = sum(rows * _COLUMNS for rows, _, _ in _rows(kind, ranks, tensors, 0))
    if written != wanted:
        raise WrongBytes(f"the plan writes {written} elements instead of {wanted}")
    return measured


def _layout(kind: str, ranks: int, tensors: int, rank: int) -> Any:
    from casckpt.plan.writers import HeldRegions
    from casckpt.saving.layout import RankLayout

    rows = _rows(kind, ranks, tensors, rank)
    streams: list[Any] = [
        (("tensor", _key(i), 0, None), "float32", (whole, _COLUMNS)) for i, (whole, _, _) in enumerate(rows)
    ]
    lo, hi = (np.array([row[i] * _COLUMNS for row in rows], dtype=np.int64) for i in (1, 2))
    held = HeldRegions(
        name=np.arange(tensors, dtype=np.uint64),
        region=lo.astype(np.uint64),
        lo=lo,
        hi=hi,
        cell=np.full(tensors, _CELL // 4, dtype=np.int64),
        itemsize=np.full(tensors, 4, dtype=np.int64),
        shared=np.ones(tensors, dtype=bool),
    )
    return RankLayout(streams, list(range(tensors)), held, b"", np.zeros(tensors, dtype=bool), {})


def _save_plans(kind: str, ranks: int, tensors: int) -> list[Any]:
    """Return the results of `DefaultSavePlanner.create_local_plan` on each rank."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    kind_of_item = WriteItemType.TENSOR if kind == "replicas" else WriteItemType.SHARD
    properties = TensorProperties(dtype=torch.float32)

    def item(number: int, whole: int, lo: int, hi: int) -> WriteItem:
        offsets = torch.Size((lo, 0))
        chunk = ChunkStorageMetadata(offsets, torch.Size((hi - lo, _COLUMNS)))
        data = TensorWriteData(chunk, properties, torch.Size((whole, _COLUMNS)))
        return WriteItem(MetadataIndex(_key(number), offsets), kind_of_item, tensor_data=data)

    def plan(rank: int) -> SavePlan:
        items = [item(i, *row) for i, row in enumerate(_rows(kind, ranks, tensors, rank))]
        return SavePlan(items, planner_data={one.index.fqn: (one.index.fqn,) for one in items})

    return [plan(rank) for rank in range(ranks)]


def _key(number: int) -> str:
    """Return a new string each time, as if it had been received."""
    return f"model.layers.{number}.weight"


def _available() -> int:
    import psutil

    return int(psutil.virtual_memory().available * 0.6)
